#!/usr/bin/env bash
# What README and docs show, as a stranger would try it, in a fresh clone and a fresh environment:
#     scripts/first_day.sh [FOLDER]
# The tiny world stands in for Stable Diffusion 3.5, and the settings below cut runs short. A step fails on a wrong exit
# status, a traceback, a warning that is not ours, or a printed path that does not exist.
#   FIRST_DAY_PYTHON     an interpreter of an environment that has flowalign's dependencies; default: make one
#   FIRST_DAY_NOTEBOOKS  1 = run the notebooks, too (about three minutes)
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
work=${1:-$(mktemp -d)}
mkdir -p "$work/steps" && cd "$work" || exit 2
: >failures
TIMEFORMAT=%R

# Settings that cut runs short ---------------------------------------------------------------------
SHORT="train.updates=2 rollout.prompts=4 rollout.batch_size=8 optimizer.micro_batch=8 optimizer.updates_per_rollout=1
    train.checkpoint_every=1 train.sample_every=1 evaluation.every=2 evaluation.prompts=3"
FEW="fidelity=null benchmarks.0.limit=2 benchmarks.1.limit=2 benchmarks.2.limit=2"

# Steps --------------------------------------------------------------------------------------------
fail() { echo "$*" >>"$work/failures"; printf '      FAIL %s\n' "$*"; }

# A warning or an error of a library, as Python, its loggers and C++ print it.
noise() {
    grep -nE '\.py:[0-9]+: \w*Warning|(WARNING|ERROR|CRITICAL)[ :]+([^ f]|f[^l])|^\[?[WE][0-9]{4}|^\[[a-z0-9_]+\]|deprecated|not passed to' "$1"
}

# The files and folders that a text names: words with a slash that begin in a folder of ours, and lines that are a file.
paths() {
    grep -ohE "(^|[[:space:]('\"\`=])($work/|outputs/|runs/|data/|mine/|configs/)[^][:space:]'\"\`,;:)(*]+" "$@" |
        sed -E "s/^[[:space:]('\"\`=]+//; s/[.]+\$//"
    grep -ohE '^[a-zA-Z0-9_-]+\.(png|html|md|json|jsonl|txt|yaml)$' "$@"
}

run() { # STATUS COMMAND...
    local wanted=$1 seconds status; shift
    number=$((number + 1)); out=$work/steps/$lane$number.out err=$work/steps/$lane$number.err
    seconds=$({ time "$@" >"$out" 2>"$err" </dev/null; } 2>&1); status=$?
    printf '%4s %7s s  %s' "$lane$number" "$seconds" "$*" | tr -s '\n ' ' ' | cut -c -150
    [ "$status" = "$wanted" ] || { fail "$lane$number: exit status $status, want $wanted"; tail -5 "$err"; }
    if grep -q '^Traceback (most recent call last)' "$out" "$err"; then fail "$lane$number: a traceback"; tail -3 "$err"; fi
    if noise "$err"; then fail "$lane$number: a warning that is not ours"; fi
}

step() { # a command that works, and the paths that it prints
    run 0 "$@"
    while read -r path; do
        [ -e "$path" ] || fail "$lane$number: it prints $path, which does not exist"
    done < <(paths "$out" "$err" | sort -u)
}

mistake() { # a command that is refused: status 2, and a reason
    run 2 "$@"
    [ -s "$err" ] || fail "$lane$number: refused without a word"
}

leaves() { for path in "$@"; do [ -e "$path" ] || fail "$lane$number: there is no $path"; done; } # files that docs promise

block() { # LANGUAGE N FILE: the Nth block of a language in a document
    awk -v open="^\`\`\`$1\$" -v want="$2" '$0 ~ open {n++; on = n == want; next} /^```$/ {on = 0} on' "$3"
}

# A fresh clone, and an environment ----------------------------------------------------------------
lane=i number=0
git clone -q -c advice.detachedHead=false "$root" flowalign && cd flowalign && mkdir mine || exit 2
[ -z "$(git -C "$root" status --porcelain -uno)" ] || echo "note: changes that are not committed are not tried"
if [ -n "${FIRST_DAY_PYTHON:-}" ]; then
    export PATH="$(dirname "$FIRST_DAY_PYTHON"):$PATH" PYTHONPATH="$PWD"
else
    python3 -m venv "$work/venv" && export PATH="$work/venv/bin:$PATH" || exit 2
    step pip install -qq --disable-pip-version-check "${FLOWALIGN_TORCH:-torch==2.13.0}"
    step pip install -qq --disable-pip-version-check -e '.[serve]'
    [ "${FIRST_DAY_NOTEBOOKS:-0}" = 0 ] || step pip install -qq --disable-pip-version-check nbclient ipykernel
fi
export HF_HUB_OFFLINE=1 # no step may ask the Hub

tiny_runs() { # shortened; tests/test_as_written.py has README and docs/quickstart.md as they stand
    step flowalign
    step flowalign --version
    step flowalign sample 'a red sign that says "CAT"' 'a photo of three stars' --guidance 1
    leaves samples.png
    step flowalign merge tiny/ocr tiny/geneval --out outputs/tiny/merged
    mistake flowalign merge tiny/ocr tiny/geneval --out outputs/tiny/merged
    step flowalign train --config configs/tiny/teacher_ocr_nft.yaml $SHORT
    leaves outputs/tiny/teacher_ocr_nft/{config.yaml,metrics.jsonl,metrics.png,samples,tensorboard,adapter,checkpoints}
    mistake flowalign train --config configs/tiny/teacher_ocr_nft.yaml
    step flowalign train --config configs/tiny/student_flow_opd.yaml $SHORT
    step flowalign train --config configs/tiny/student_flow_opd.yaml $SHORT train.updates=3 --resume
    step flowalign watch outputs/tiny/student_flow_opd
    leaves outputs/tiny/student_flow_opd/report.html
    step python -m flowalign.eval --config configs/tiny/eval.yaml models.student=outputs/tiny/student_flow_opd/adapter $FEW
    leaves outputs/tiny/eval/{table.md,results.json,report.html,images}
    step python -m flowalign.eval --config configs/tiny/eval.yaml models.ocr=tiny/ocr $FEW
    step python -m flowalign.eval --config configs/tiny/eval.yaml output=outputs/tiny/eval_base $FEW
    step python -m flowalign.eval compare outputs/tiny/eval_base/results.json outputs/tiny/eval/results.json --models base ocr
    step flowalign eval --config configs/tiny/eval.yaml models.teacher=outputs/tiny/teacher_ocr_nft/adapter $FEW
    step accelerate launch --config_file configs/accelerate/ddp_2cpu.yaml -m flowalign.eval --config configs/tiny/eval.yaml $FEW
    step flowalign train --config configs/tiny/demo.yaml stages.student.train.updates=1 stages.student.rollout.prompts=4 "stages.table.set=[${FEW// /, }]"
    leaves outputs/demo/table/report.html
}

own_runs() { # three configs that are written from the docs: an own reward's teacher, a student of two, an evaluation
    local server url
    block python 2 README.md >mine/my_rewards.py
    printf '%s\n' 'a red sign that says "CAT"' 'a blue sign that says "DOG"' 'a green sign that says "POND"' >mine/train.txt
    printf '%s\n' 'a red sign that says "DOG"' 'a blue sign that says "TEA"' >mine/test.txt
    cp mine/train.txt my.txt
    step flowalign init --stage grpo --model tiny --reward ocr --prompts my.txt --out my.yaml
    run 0 flowalign doctor --config my.yaml --no-model # names a folder that it does not write
    cat >mine/teacher.yaml <<'YAML'
stage: grpo
output: runs/teacher_red
model: {id: tiny, height: 96, width: 96, max_sequence_length: 14}
tasks:
  - {name: red, prompts: mine/train.txt, validation: mine/test.txt, reward: {name: "my_rewards:redness"}}
rollout: {guidance: 1.0, prompts: 2, group_size: 4, batch_size: 8}
optimizer: {micro_batch: 8}
ema: null
train: {updates: 2}
YAML
    step flowalign doctor --config mine/teacher.yaml
    step flowalign train --config mine/teacher.yaml
    step flowalign merge tiny/preference runs/teacher_red/adapter --out runs/merged
    for name in red photos; do cp mine/train.txt mine/$name.txt; cp mine/test.txt mine/${name}_val.txt; done
    step flowalign init --stage opd --loras runs/teacher_red/adapter tiny/preference --prompts mine/red.txt mine/photos.txt \
        --out mine/student.yaml output=runs/student
    step flowalign train --config mine/student.yaml $SHORT
    cat >mine/eval.yaml <<'YAML'
stage: eval
output: runs/eval
model: {id: tiny, height: 96, width: 96, max_sequence_length: 14}
models: {base: null, teacher: runs/teacher_red/adapter, student: runs/student/adapter}
benchmarks:
  - {name: red, prompts: mine/test.txt, reward: {name: "my_rewards:redness"}}
  - {name: signs, prompts: mine/test.txt, reward: {name: ocr}}
sampling: {steps: 10, guidance: 1.0}
YAML
    step flowalign eval --config mine/eval.yaml
    leaves runs/eval/{report.html,table.md}

    # A reward on another machine
    PYTHONPATH="${PYTHONPATH:-}:mine" flowalign serve-reward my_rewards:redness --port 0 >"$work/steps/server" 2>&1 &
    server=$!
    for _ in $(seq 60); do url=$(grep -oEm1 'http://[0-9.]+:[0-9]+' "$work/steps/server") && break; sleep 1; done
    step flowalign train --config mine/teacher.yaml output=runs/remote train.updates=1 \
        "tasks.0.reward={name: remote, options: {urls: '$url'}}"
    kill "$server"; wait "$server"
    if grep -q Traceback "$work/steps/server"; then fail "serve-reward ends with a traceback"; fi

    step flowalign data list
}

mistakes() { # each is refused before anything is written
    mistake flowalign trian --config configs/tiny/teacher_ocr.yaml
    mistake flowalign train --config configs/tiny/teacher_orc.yaml
    mistake flowalign train --config configs/tiny/eval.yaml
    mistake flowalign train --config configs/tiny/teacher_ocr.yaml output=runs/x optimizer.lrr=1
    mistake flowalign train --config configs/tiny/teacher_ocr.yaml output=runs/x tasks.0.prompts=mine/nothing.txt
    mistake flowalign train --config configs/tiny/student_flow_opd.yaml output=runs/x lora.init=runs/merged/adapter
    mistake flowalign train --config configs/sd35_medium/teacher_geneval.yaml output=runs/x
    mistake flowalign eval --config configs/tiny/eval.yaml output=runs/x models.x=runs/nobody/adapter
    mistake flowalign sample 'a star' --lora tiny/nobody
    mistake flowalign sample 'a star' --size 100
    mistake flowalign doctor --reward geneval detektor=tiny
    mistake flowalign serve-reward pickscor
    mistake flowalign watch runs/nobody
    mistake flowalign init --stage grpo --reward orc --out mine/init.yaml
    if [ -e runs/x ]; then fail "a refused command wrote runs/x"; fi
}

{ lane=a; tiny_runs; } &
first=$!
{ lane=b; own_runs; mistakes; } & # two at a time, as the machines of CI have two cores
wait "$first" $!
lane=n
if [ "${FIRST_DAY_NOTEBOOKS:-0}" = 1 ]; then
    for notebook in notebooks/*.ipynb; do
        step jupyter execute --timeout=300 "$notebook"
    done
fi

echo
[ -s "$work/failures" ] || { echo "All steps are as the documents say. They are in $work"; exit 0; }
echo "$(wc -l <"$work/failures") failures; what the steps printed is in $work/steps"
exit 1
