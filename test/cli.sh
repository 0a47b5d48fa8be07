# Sourced by the tests that run the program as a user does: counting, refusals, values from its JSON. $TRAIN: the
# program under test (sanitized). $WORK: an empty folder for this run. TEST_DEVICE=gpu: it runs on a GPU.
# TEST_PRECISION=bf16: its build.
TEST_DEVICE=${TEST_DEVICE:-cpu} TEST_PRECISION=${TEST_PRECISION:-fp32}
passed=0 failed=0 skipped=0
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
GOLDEN=test/golden
SHARD=$GOLDEN/tokens_uint16.bin # 4097 tokens below 96, entropy ln 3 per token
TINY=llama,hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,vocab_size=96

pass() { passed=$((passed + 1)); }
fail() { failed=$((failed + 1)); echo "FAILED: $*"; }
skip() { echo "[  SKIPPED ] $1: NOT TESTED, because $2"; skipped=$((skipped + 1)); }
check() { # what, command...: the command succeeds
    what=$1
    shift
    if "$@"; then pass; else fail "$what"; fi
}
says() { # out or err, pattern...: each matches a line of it
    file=$1
    shift
    for line; do check "$file says '$line'" grep -q -- "$line" "$WORK/$file"; done
}
# Runs the program; `train` without --out keeps nothing.
run() {
    case "$*" in train*' --out'*) ;; 'train '*) set -- "$@" --out none ;; esac
    $LAUNCHED "${planner:-$TRAIN}" "$@" >"$WORK/out" 2>"$WORK/err"
}
sanitized=$TRAIN planner=
LAUNCHED= # words before it
double_build() { # takes the program in double, which it makes: -O1, for the compiler takes longer than the runs
    TRAIN=build/test-double/train
    flock build "${MAKE:-make}" -s BACKEND=cpu PRECISION=double BUILD="${TRAIN%/*}" CFLAGS=-O1 "$TRAIN" >/dev/null || fail 'the double build cannot be made'
}
succeeds() { # arguments: exit 0. Plans, which are long arithmetic and sanitized in test_plan and test_estimate, by the plain program
    [ "$1" = plan ] && [ "$TRAIN" = "$sanitized" ] && planner=${TRAIN_PLAIN:-}
    run "$@"
    set -- $? "$@"
    planner=
    if [ "$1" = 0 ]; then pass; else fail "exit $1 of: train $(shift; echo "$*")"; sed 's/^/    /' "$WORK/err" | tail -n 5; fi
}
# refuses CODE PATTERN arguments...: this exit code, nothing on stdout, one matching line on stderr that begins with
# "train: ". No leak check: a refusal ends the program without freeing.
refuses() {
    code=$1 pattern=$2
    shift 2
    LAUNCHED="env ASAN_OPTIONS=${ASAN_OPTIONS:-}:detect_leaks=0"
    run "$@"
    status=$?
    LAUNCHED=
    lines=$(grep -c '^train: ' "$WORK/err")
    if [ $status != "$code" ]; then fail "exit $status, not $code, of: train $*"
    elif [ "$lines" != 1 ]; then fail "$lines error lines of: train $*"
    elif ! grep '^train: ' "$WORK/err" | grep -qE -- "$pattern"; then
        fail "the message does not say '$pattern': $(grep '^train: ' "$WORK/err" | cut -c1-200)"
    elif grep -qE 'Sanitizer|runtime error' "$WORK/err"; then fail "sanitizer report of: train $*"
    else pass; fi
}
json() { # key of the one-line object in $WORK/out: its number or text
    sed -n 's|.*"'"$1"'": "\{0,1\}\([^",}]*\).*|\1|p' "$WORK/out" | head -n 1
}
make_documents() { # arguments of test/data/make_documents.c, which is built first
    [ -x "$WORK/make_documents" ] || ${CC:-cc} -D_GNU_SOURCE -O1 -I. test/data/make_documents.c -lm -o "$WORK/make_documents"
    "$WORK/make_documents" "$@" || fail "make_documents $*"
}
steps_of() { grep -v '"options"' "$1/log.jsonl" | sed 's/"seconds".*//; s/"time".*//'; }
same_checkpoint() { # folder, folder, step: the weights and the optimizer's state hold the same bits
    for file in "$1/checkpoint-$(printf %08d "$3")"/*[ns]; do # .bin, .safetensors
        [ "${file##*.}" = json ] || cmp -s "$file" "$2${file#"$1"}" || return 1
    done
}
same_run() { same_checkpoint "$@" && [ "$(steps_of "$1")" = "$(steps_of "$2")" ]; }
# Trains at once in $WORK/NAME and in two parts in $WORK/NAME-parts: the last checkpoints are equal to the bit.
in_two_parts() { # name, steps, options of the second part, arguments
    parts=$1 steps=$2 more=$3
    shift 3
    succeeds train "$@" --steps $steps --out "$WORK/$parts"
    succeeds train "$@" --steps $((steps / 2)) --out "$WORK/$parts-parts"
    succeeds train "$@" --steps $steps --out "$WORK/$parts-parts" --resume $more
    check "$parts in two parts" same_checkpoint "$WORK/$parts" "$WORK/$parts-parts" $steps
}
next_works() { # out or err: runs both commands that a run prints last
    sed -n 's/^try it   \|^export   //p' "$WORK/$1" >"$WORK/next"
    check "what to type next: $(cat "$WORK/next")" [ "$(wc -l <"$WORK/next")-$(sh -e "$WORK/next" >/dev/null 2>&1; echo $?)" = 2-0 ]
}
close() { # a, b, relative difference allowed
    awk -v a="$1" -v b="$2" -v d="$3" 'BEGIN { x = a - b; if (x < 0) x = -x; s = b < 0 ? -b : b; exit !(a != "" && b != "" && x <= d * s) }'
}
finish() {
    echo "$passed passed, $failed failed, $skipped skipped"
    [ $failed = 0 ]
}
