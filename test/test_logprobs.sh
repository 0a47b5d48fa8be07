#!/bin/sh
# The verb logprobs as a user runs it: what it writes are the log-probabilities whose mean is eval's loss, however documents are packed and
# chunked; a file is complete or absent, and what it cannot be made of is refused.
. test/cli.sh
${CC:-cc} -D_GNU_SOURCE -O1 -I. test/make_documents.c -lm -o "$WORK/make_documents" || { fail 'the writer of shards does not compile'; finish; exit 1; }
make_documents() { "$WORK/make_documents" "$@" || fail "make_documents $*"; }
make_documents "$WORK/a.bin" 96 40,64,51,33,200,45,58 4 10
make_documents "$WORK/b.bin" 96 30,2,120 5
data="$WORK/a.bin $WORK/b.bin" # 643 tokens in 10 documents
values() { od -A n -v -t f4 -w4 -j 256 "$1"; }
same_values() { # file, file, difference allowed
    values "$1" >"$WORK/values"
    values "$2" | paste - "$WORK/values" | awk -v d="$3" '{ x = $1 - $2; if (x < 0) x = -x; if (!(x <= d) || ($1 == 0) != ($2 == 0)) bad = 1; n++ }
        END { exit bad || !n }'
}

# ---- the loss of eval, from the file itself ------------------------------------------------------------------------------------------
tolerance=1e-5
[ $TEST_PRECISION = bf16 ] && tolerance=2e-2
for options in '--seq-len 200' '--seq-len 64' '--seq-len 64 --long truncate' '--seq-len 64 --batch 3 --chunk 9 --logits-chunk 7'; do
    succeeds eval --init $TINY --data $data $options --json --quiet
    loss=$(json loss) tokens=$(json tokens)
    rm -f "$WORK/x.logprobs"
    succeeds logprobs --init $TINY --data $data $options --out "$WORK/x.logprobs" --json --quiet
    check "the loss is eval's: $options" close "$(json loss)" "$loss" 1e-9
    check "and so are the targets: $options" [ "$(json counted)" = "$tokens" ]
    check "all tokens have a value: $options" [ "$(json tokens) $(json documents) $(values "$WORK/x.logprobs" | wc -l)" = '643 10 643' ]
    mean=$(values "$WORK/x.logprobs" | awk '{ s -= $1; n += $1 != 0 } END { printf "%.9f", s / n }')
    check "the file's values have that mean: $options" close "$mean" "$loss" 1e-6
done
succeeds logprobs --init $TINY --data "$WORK/*.bin" --seq-len 64 --out "$WORK/one.logprobs" --json --quiet
keys="$(json model_key) $(json data_key)"
check 'keys are 16 digits' expr "$keys" : '[0-9a-f]\{16\} [0-9a-f]\{16\}$' >/dev/null
check 'packing and chunks change rounding alone' same_values "$WORK/x.logprobs" "$WORK/one.logprobs" $tolerance
succeeds logprobs --init $TINY --data $data --seq-len 64 --threads 1 --out "$WORK/again.logprobs" --json --quiet
check 'the same model and data have the same keys' [ "$(json model_key) $(json data_key)" = "$keys" ]
succeeds logprobs --init $TINY --data "$WORK/a.bin" --seq-len 64 --seed 3 --out "$WORK/other.logprobs" --json --quiet
check 'another seed is another model' [ "$(json model_key)" != "${keys% *}" ]
check 'fewer shards are other data' [ "$(json data_key)" != "${keys#* }" ]

# ---- temperature -------------------------------------------------------------------------------------------------------------------------
succeeds logprobs --init $TINY --data $data --seq-len 64 --temperature 1000 --out "$WORK/hot.logprobs" --json --quiet
check 'a high temperature makes all tokens alike' close "$(json loss)" 4.564348 1e-3 # ln 96
refuses 2 'temperature 0 leaves the likeliest token alone' \
    logprobs --init $TINY --data $data --seq-len 64 --temperature 0 --out "$WORK/cold.logprobs"

# ---- for people --------------------------------------------------------------------------------------------------------------------------
succeeds logprobs --init $TINY --data $data --seq-len 200 --out "$WORK/x.logprobs"
check 'it says what it wrote' grep -q 'x.logprobs: [0-9]* log-probabilities of 10 documents, on average -[0-9.]*$' "$WORK/out"
check 'it says what it reads' grep -q '^data     10 documents in 2 shards' "$WORK/out"

# ---- what is refused leaves nothing behind -----------------------------------------------------------------------------------------------
refuses 2 'no output: give --out with the file to write' logprobs --init $TINY --data $data --seq-len 64
refuses 2 'no data: give --data' logprobs --init $TINY --out "$WORK/no.logprobs"
refuses 1 'is one of llm.c.s shards, which have no documents' \
    logprobs --init $TINY --data $SHARD --seq-len 64 --out "$WORK/no.logprobs"
refuses 1 'no.logprobs: cannot be created: No such file' logprobs --init $TINY --data $data --seq-len 200 --out "$WORK/nowhere/no.logprobs"
refuses 1 'a.bin: is there already and is no file of log-probabilities' \
    logprobs --init $TINY --data $data --seq-len 200 --out "$WORK/a.bin"
cp "$WORK/a.bin" "$WORK/faulty.bin"
printf '\007' | dd of="$WORK/faulty.bin" bs=1 seek=$(($(wc -c <"$WORK/faulty.bin") - 5)) conv=notrunc 2>/dev/null # a count of the last document
refuses 1 'faulty.bin: the checksum of document 6 is wrong' \
    logprobs --init $TINY --data "$WORK/faulty.bin" --seq-len 200 --out "$WORK/no.logprobs"
check 'nothing is left of what failed' [ "$(find "$WORK" -name 'no.logprobs*' | wc -l)" = 0 ]
finish
