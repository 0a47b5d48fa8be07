#!/bin/sh
# Compares the longest sequences of fine-tuning on a card of 80 GB, by `plan`, with Table 3 of the StreamBP paper (arXiv 2506.03077):
# SFT, GRPO and DPO of Qwen3-4B to 32B, all weights or LoRA, everything on one device.
#
#     scripts/paper_max_length.sh        TRAIN=./train LIMIT=a100 (or bytes)
#
# Nothing is trained or allocated. The paper's values come from scripts/paper/tables.csv and are always called the paper's.
# Exit 1 if one of our lengths is below the paper's length for StreamBP.
set -eu
cd "$(dirname "$0")/.."
. scripts/common.sh
TRAIN=${TRAIN:-./train}
LIMIT=${LIMIT:-a100} # the paper's A800 has the same memory; ./train knows how much of it a program can use
[ -x "$TRAIN" ] || { echo "paper_max_length.sh: there is no $TRAIN yet; run make first" >&2; exit 1; }

BYTES=$(usable_bytes "$LIMIT")
GIB=$(awk -v bytes="$BYTES" 'BEGIN { printf "%.1f", bytes / 2^30 }')
LORA="--lora-rank 32 --lora-alpha 128 --lora-targets all"

# longest MODEL OBJECTIVE [more options]: prints the tokens of one sequence; 0 if not even one token fits
longest() { longest_within "$LIMIT" "$@"; }
longest_within() { # BYTES, then the arguments of longest
    longest_limit=$1 longest_model=$2 longest_objective=$3
    shift 3
    case $longest_objective in
    grpo) set -- --group-size 8 --beta 0.04 "$@" ;; # the paper's code needs a divergence from a reference
    esac
    # one thread: the scratch memory of a CPU's other threads does not belong to this comparison
    "$TRAIN" plan --init "$longest_model,$ANY_LENGTH" --objective "$longest_objective" --seq-len 1024 --dtype bf16 --threads 1 \
        --memory-limit "$longest_limit" --json --quiet $ON_DEVICE "$@" | json_number max_seq_len
}

# ---- every row ---------------------------------------------------------------------------------------------------------------
# model, objective, full or lora; the paper's standard, checkpointing, StreamBP; ours: trained with the paper's chunks and with our defaults,
# then both for a pass without an update, which the paper measured
rows=$(awk -F, '$1 == "table3_max_len" { print $2, $3, $5, $6, $8 }' $PAPER_TABLES |
    while read -r model objective trained standard checkpoint stream; do
        case $trained in
        full) what= optimizer="--moments bf16 --master none" ;;
        lora) what=$LORA optimizer= ;;
        *) echo "paper_max_length.sh: $PAPER_TABLES: '$trained' is not full or lora" >&2 && exit 1 ;;
        esac
        echo "$(title "$model") $objective $trained $standard $checkpoint $stream" \
            "$(longest "$model" "$objective" $what $optimizer $PAPER_CHUNKS) $(longest "$model" "$objective" $what $optimizer)" \
            "$(longest "$model" "$objective" $what --for bp $PAPER_CHUNKS) $(longest "$model" "$objective" $what --for bp)"
    done)
[ -n "$rows" ] || { echo "paper_max_length.sh: $PAPER_TABLES has no rows of Table 3" >&2; exit 1; }

# ---- the table ---------------------------------------------------------------------------------------------------------------
cat <<END
Longest sequence in thousands of tokens. 'ours': the plan of ./train with --method stream within $GIB GiB, everything on the device; chunks of
500 tokens and logits of 100 as in the paper, or defaults. 'trained': with AdamW. 'a pass': one forward and backward pass without an
update, to compare with the paper. 'paper': what the StreamBP paper (arXiv 2506.03077, Table 3) measured of standard backpropagation,
gradient checkpointing and its own implementation on an A800 of 80 GB; its scripts stop before the first update.

                       | ours, trained         | paper, a pass                | ours, a pass          over the paper's StreamBP
model      run         | its chunks   defaults | standard  checkpoint  stream | its chunks   defaults   its chunks     defaults
END
echo "$rows" | awk '{ printf "%-10s %-4s %-6s | %10.1f  %9.1f | %8s  %10s  %6s | %10.1f  %9.1f  %11.2f  %11.2f\n", $1, toupper($2),
    $3 == "lora" ? "LoRA" : $3, $7 / 1000, $8 / 1000, $4, $5, $6, $9 / 1000, $10 / 1000, $9 / 1000 / $6, $10 / 1000 / $6 }'

cat <<'END'

What is counted, and what was assumed where the paper does not say:
- Weights, activations and gradients in bf16, one sequence (SFT), one pair (DPO) or one group (GRPO) in a stream.
- LoRA: rank 32, alpha 128, all linear layers; trained with moments and master copies of the adapters in fp32.
- full: trained with both moments in bf16 and no master weights (--moments bf16 --master none).
- DPO: the length is that of each of the two sequences; chosen and rejected are documents of one stream, their prompt stored
  with both. The reference's log-probabilities are computed beforehand (full) or by the base model without its adapters (LoRA):
  there is no second model.
- GRPO: the length is that of each of 8 sequences, prompt and completion, all of them in one stream; with a divergence from a
  reference (beta 0.04), which comes as for DPO. The completions have been written before: no key/value cache is counted.
END

# The paper's two lengths for all weights of Qwen3-8B
figure=$(awk -F, '$1 == "fig3_max_len" && $2 == "qwen3-8b" { print $8 }' $PAPER_TABLES)
table=$(awk -F, '$1 == "table3_max_len" && $2 == "qwen3-8b" && $3 == "sft full" { print $8 }' $PAPER_TABLES)
weights=$("$TRAIN" plan --init qwen3-8b --dtype bf16 --for bp --json --quiet | json_number weights)
rest=$((BYTES - weights))
with_copy=$(longest_within "$rest" qwen3-8b sft --for bp $PAPER_CHUNKS)
awk -v figure="$figure" -v table="$table" -v weights="$weights" -v ours="$with_copy" 'BEGIN {
    printf "- Qwen3-8B, SFT full: the paper has two lengths. %sk (Figure 3) is a bare forward and backward pass; %sk (Table 3) is a pass of its\n", figure, table
    printf "  fine-tuning script. At its 0.43 GiB per 1,000 tokens they are %.0f GiB apart, about a copy of the weights (%.1f GiB), of which\n", (figure - table) * 0.43, weights / 2^30
    printf "  the paper says nothing. A pass of ours with a copy more: %.1fk.\n", ours / 1000 }'

# ---- the verdict -------------------------------------------------------------------------------------------------------------
echo "$rows" | awk '{
    n++
    for (i = 9; i <= 10; i++) {
        if ($i >= 1000 * $6) continue
        printf "BELOW the paper: %s %s %s, %s: %.1fk, paper %sk\n", $1, $2, $3, i == 9 ? "its chunks" : "defaults", $i / 1000, $6
        below++
    } }
    END { if (!below) printf "\nAll %d rows reach the paper'\''s StreamBP in a pass like its own, with its chunks and with our defaults.\n", n
          exit below > 0 }'
