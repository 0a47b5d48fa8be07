#!/bin/sh
# scripts/paper_max_length.sh: every row of the paper's Table 3 is there and reached, and one that is not would be said.
. test/cli.sh
LENGTHS=scripts/paper_max_length.sh
TRAIN=$TRAIN_PLAIN # plans only
export TRAIN
lengths() { # what, exit status, variables...: runs the script
    what=$1 wanted=$2
    shift 2
    env "$@" $LENGTHS >"$WORK/out" 2>"$WORK/err"
    check "exit $wanted $what" [ $? = "$wanted" ]
}

lengths 'within 79 GiB' 0 LIMIT=79
sed 's/|/ /g' "$WORK/out" >"$WORK/table"
# The table's own numbers against the paper's file, not the script's verdict.
awk -F, '$1 == "table3_max_len" { split($3, run, " "); print $2, run[1], run[2], $8 }' scripts/paper/tables.csv >"$WORK/paper"
while read -r model objective trained paper; do
    row=$(tr 'A-Z' 'a-z' <"$WORK/table" | awk -v m="$model" -v o="$objective" -v t="$trained" '$1 == m && $2 == o && $3 == t')
    check "one row of $model, $objective $trained" [ "$(echo "$row" | grep -c "$model")" = 1 ]
    check "$model, $objective $trained: the paper's $paper is reached" awk -v paper="$paper" -v row="$row" 'BEGIN {
        split(row, column, " ")
        exit !(column[6] == paper && column[7] + 0 >= paper && column[8] + 0 >= paper) }'
done <"$WORK/paper"
check 'fifteen rows' [ "$(grep -c . "$WORK/paper")" = 15 ]

lengths 'where the weights of 32B hardly fit' 1 LIMIT=64
check 'and the rows below the paper are named' [ "$(grep -c '^BELOW the paper: Qwen3-32B ' "$WORK/out")" = 4 ]
lengths 'without the program' 1 TRAIN="$WORK/nothing"
check 'with a line that says so' grep -q 'paper_max_length.sh: there is no .*nothing yet; run make first' "$WORK/err"
finish
