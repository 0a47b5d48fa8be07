#!/bin/sh
# The StreamBP paper's Table 1 (seconds of forward and backward), Table 2 (batches) and Figure 3 (peak memory, longest sequence), measured
# here with compare.py, beside what the paper published of an A800 of 80 GB (arXiv 2506.03077; scripts/paper/*.csv).
#
#     dev/compare/paper_tables.sh [--tables 1,2,3] [--layers N] [--keys KEY=VALUE,...] [--divide N] [--limit BYTES] [compare.py's options]
#
# --layers N: models of N layers, where memory or time demands it; the published values stay those of the whole model, and this is said.
# --keys: of the shape, as ./train's --init has them. --divide N: lengths N times shorter, for a try. --limit: of Figure 3's longest
# sequences (a100, the card that the paper has; or 40GiB). Everything else goes to compare.py: --python, --paper, --paper-python, --resume, ...
# Chunks are the paper's: a third of the sequence where time is measured, 500 tokens where memory is; 100 tokens of logits. Writes
# $OUT/table1, ... (OUT=build/paper_tables), each with compare.md, .csv, .json and .png. Exit 1 where a comparison failed.
set -eu
cd "$(dirname "$0")/../.."
. scripts/common.sh
OUT=${OUT:-build/paper_tables}
FIG3=scripts/paper/fig3_bp_memory.csv
TABLE2_T=12000 # the paper does not say; its seconds of batch 1 are Table 1's at this length
tables=1,2,3 layers= keys= divide=1 limit=a100 status=0
while [ $# -ge 2 ]; do
    case $1 in
    --tables) tables=$2 ;;
    --layers) layers=$2 ;;
    --keys) keys=$2 ;;
    --divide) divide=$2 ;;
    --limit) limit=$2 ;;
    *) break ;;
    esac
    shift 2
done
case $layers$divide in *[!0-9]* | '' | 0*) echo "paper_tables.sh: --layers and --divide want a number" >&2 && exit 2 ;; esac
wanted() { case ,$tables, in *,"$1",*) ;; *) return 1 ;; esac; }
shape() { echo "$1${layers:+,num_hidden_layers=$layers}${keys:+,$keys}"; }
lengths() { awk -v d="$divide" '{ printf "%s%d", (NR > 1 ? "," : ""), $1 / d }'; } # one a line -> a list
field() { # file, column's name, contender, T: from compare.py's CSV
    awk -F, -v column="$2" -v name="$3" -v T="$4" 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == column) c = i }
        $1 == name && $2 == T { print $c }' "$1"
}
compare() { # folder below $OUT, model, more options; those of the command line come last and win
    folder=$1 model=$2
    shift 2
    dev/compare/compare.py --init "$(shape "$model")" --logits-chunk 100 --out "$OUT/$folder" "$@" >"$OUT/$folder.log" || status=1
    [ -e "$OUT/$folder/compare.csv" ] || { echo "paper_tables.sh: $folder: compare.py wrote no results" >&2 && exit 1; }
}
contenders_of() { awk -F, 'NR > 1 && !seen[$1]++ { print $1 }' "$1"; } # a CSV
mkdir -p "$OUT"
echo "Published: the paper's own values, on an A800 of 80 GB, whole models in bf16, as it has them. Here: measured by compare.py."
[ -z "$layers$keys" ] || echo "Here the models are cut down: ${layers:+num_hidden_layers=$layers }$keys. Published and measured are not of the same model."
[ "$divide" = 1 ] || echo "Here the lengths are $divide times shorter."

# ---- Tables 1 and 2: time ------------------------------------------------------------------------------------------------------
# rows FILE DIVISOR: stdin has T and the published values; adds what each contender took here, in seconds or, of a CPU, over stream's
rows() {
    while read -r T published; do
        row="| $T | $(echo "$published" | sed 's/ / | /g; s/-/ /g') |"
        for name in $(contenders_of "$1"); do
            value=$(field "$1" seconds "$name" "$T")
            value=${value:-$(field "$1" time_ratio "$name" "$T")}
            error=$(field "$1" error "$name" "$T")
            row="$row ${error:-$(awk -v v="$value" -v b="$2" 'BEGIN { printf "%.3g", v / b }')} |"
        done
        echo "$row"
    done
}
heading() { # CSV, first column, published columns...
    csv=$1 head="| $2"
    shift 2
    unit=$([ -n "$(awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == "seconds") c = i } NR > 1 { print $c }' "$csv" | head -c 1)" ] && echo s || echo "over stream's")
    for name in "$@"; do head="$head | published: $name, s"; done
    for name in $(contenders_of "$csv"); do head="$head | here: $name, $unit"; done
    echo "$head |"
    echo "$head |" | sed 's/[^|]\{1,\}/---/g'
}
if wanted 1; then
    published=$(awk -F, -v d="$divide" '$1 == "table1_bp_seconds" { sub("k", "", $4); for (i = 5; i <= 8; i++) if ($i == "") $i = "-"
        print int(1000 * $4 / d), $5, $6, $7, $8 }' $PAPER_TABLES)
    compare table1 qwen3-4b --chunk T/3 --seq-lens "$(echo "$published" | awk '{ print $1 }' | paste -sd ,)" "$@"
    printf '\nTable 1: forward and backward of Qwen3-4B\n\n'
    heading "$OUT/table1/compare.csv" T full checkpoint mst stream
    echo "$published" | rows "$OUT/table1/compare.csv" 1
fi
if wanted 2; then
    T=$((TABLE2_T / divide))
    printf '\nTable 2: Qwen3-4B, T = %s, time of a sample (of a pass, over the batch)\n' $T
    for batch in 1 2 4 16; do
        compare table2-$batch qwen3-4b --chunk T/3 --seq-lens $T --batch $batch "$@"
        published=$(awk -F, -v s="batch $batch" '$1 == "table2_seconds_per_sample" && $3 == s { for (i = 6; i <= 8; i++) if ($i == "") $i = "-"
            print $6, $7, $8 }' $PAPER_TABLES)
        per=$batch
        [ -n "$(field "$OUT/table2-$batch/compare.csv" seconds stream $T)" ] || per=1 # a ratio is one already
        printf '\nbatch %s\n\n' $batch
        heading "$OUT/table2-$batch/compare.csv" T checkpoint mst stream
        echo "$T $published" | rows "$OUT/table2-$batch/compare.csv" $per
    done
fi

# ---- Figure 3: memory ----------------------------------------------------------------------------------------------------------
# The published curve of a method at a length, between its points; nothing beyond them.
published_gib() { # model, method, T
    awk -F, -v m="$1" -v k="$2" -v T="$3" '$1 == m && $2 == k {
        if (n++ && T0 <= T && T <= $3) { printf "%.1f", y0 + ($4 - y0) * (T - T0) / ($3 - T0); exit }
        T0 = $3; y0 = $4 }' $FIG3
}
if wanted 3; then
    for model in qwen3-8b qwen3-14b; do # its 32B has gradients of LoRA adapters only
        points=$(awk -F, -v m=$model '$1 == m && $2 == "checkpoint" { if (!n++) print $3; last = $3 } $1 == m && $2 == "stream" { T[++k] = $3 }
            END { print last; for (i = 0; i < 5; i++) print T[1 + int(i * (k - 1) / 4)] }' $FIG3 | sort -n -u) # both ends of both curves
        compare fig3-$model $model --chunk 500 --seq-lens "$(echo "$points" | lengths)" --longest --memory-limit "$limit" "$@"
        csv=$OUT/fig3-$model/compare.csv
        printf '\nFigure 3: %s, peak memory in GiB\n\n' "$(title $model)"
        head="| T | published: checkpoint | published: stream |"
        for name in $(contenders_of "$csv"); do head="$head here: $name |"; done
        echo "$head"
        echo "$head" | sed 's/[^|]\{1,\}/---/g'
        for point in $points; do
            T=$((point / divide))
            row="| $T | $(published_gib $model checkpoint "$point") | $(published_gib $model stream "$point") |"
            for name in $(contenders_of "$csv"); do
                bytes=$(field "$csv" peak_bytes "$name" $T)
                row="$row $([ -n "$bytes" ] && awk -v b="$bytes" 'BEGIN { printf "%.3g", b / 2^30 }' || field "$csv" error "$name" $T) |"
            done
            echo "$row"
        done
        printf '\n%s, longest T within %s; published: ' "$(title $model)" "$limit"
        awk -F, -v m=$model '$1 == "fig3_max_len" && $2 == m { printf "checkpoint %sk, stream %sk\n\n", $6, $8 }' $PAPER_TABLES
        awk -F, 'NR == 1 { print "| contender | longest T |\n|---|---|" } NR > 1 { printf "| here: %s | %s |\n", $1, $2 ? $2 : $6 }' "$OUT/fig3-$model/longest.csv"
    done
fi
exit $status
