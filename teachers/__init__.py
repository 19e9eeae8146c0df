"""Teachers: training specialists, merging them, and labelling with them."""

if __name__ != "flowalign.teachers":
    raise ImportError("import this package as flowalign.teachers, so that nothing exists twice.")
