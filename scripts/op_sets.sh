#!/bin/sh
# op_sets.sh cpu_fp32 cpu_bf16 ...: prints the source of a program's list of op sets, in order of preference (llmc/ops/ops.h).
names=$(printf ' ops_%s,' "$@")
addresses=$(printf '&ops_%s, ' "$@")
echo "extern const struct Ops${names%,};"
echo "const struct Ops *const op_sets[] = {${addresses}0};"
echo "const struct Ops *ops_device = &ops_$1;"
