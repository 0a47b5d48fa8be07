#!/bin/sh
# Prints the plan of every recipe of this folder, by ./train, as a table. A recipe's comment "# plan OPTIONS: plan" has the options that
# plan needs in addition to the recipe, and plan's result.
#
#     scripts/recipes/plans.sh             prints the table; exit status 1 if a recipe does not fit, or its comment differs from the plan
#     scripts/recipes/plans.sh --write     writes plan's results into the comments
#
# PROMPTS=FILE: a shard of prompts; without it recipes with rollouts are left out.
set -eu
cd "$(dirname "$0")/../.."
. scripts/common.sh
TRAIN=${TRAIN:-./train} status=0
echo "| recipe | plan | longest sequence |"
echo "|---|---|---|"
for file in scripts/recipes/*.args; do
    name=$(basename "$file" .args)
    comment=$(grep '^# plan' "$file")
    options=$(echo "${comment#\# plan}" | sed "s/--init [^ :]*/&,$ANY_LENGTH/")
    options=${options%%:*}
    case $options in
    *PROMPTS*)
        [ -n "${PROMPTS:-}" ] || { echo "plans.sh: $name: left out, it needs PROMPTS=FILE" >&2 && continue; }
        options=${options%PROMPTS}$PROMPTS
        ;;
    esac
    json=$("$TRAIN" plan --config "$file" $options --threads 1 --json --quiet) || { status=1 && continue; }
    needs=$(echo "$json" | json_number total_bytes) usable=$(echo "$json" | json_number usable_bytes)
    said=$(echo "$needs $usable $(echo "$json" | json_number max_seq_len) $(echo "$json" | json_number host_bytes)" |
        awk '{ needs = $1 / 2^30; printf "%.*f of %.1f GiB%s; %sk tokens would fit\n", 1 + (needs < 1), needs, $2 / 2^30,
               $4 ? sprintf(" and %.0f GiB of host memory", $4 / 2^30) : "", $3 < 102400 ? int($3 / 102.4) / 10 : int($3 / 1024) }')
    echo "| \`$name\` | ${said%;*} | ${said#*; } |" | sed 's/ tokens would fit / /'
    echo "$json" | grep -q '"fits": true' || { echo "plans.sh: $name: does not fit" >&2 && status=1; }
    [ "${1:-}" != --write ] || sed -i "s/^\(# plan[^:]*:\).*/\1 $said/" "$file"
    grep -q "^# plan.*: $said\$" "$file" || { echo "plans.sh: $name: its comment does not say $said" >&2 && status=1; }
done
exit $status
