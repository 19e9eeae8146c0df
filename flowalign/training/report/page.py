"""HTML pages in one file, without a network: the templates and the style that all of them share.

A page is a template in `templates/` that extends `page.html.j2` (head, style, title).
"""

from __future__ import annotations


def render(template: str, **content: object) -> str:
    """The page of `templates/<template>`. content: its variables, `title` among them.

    Texts are escaped, since prompts and reasons come from files and models. A variable that the
    template names and `content` lacks raises jinja2.UndefinedError.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("flowalign.training.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**content)
