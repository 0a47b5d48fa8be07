# Sourced by the recipes of this folder: checks the program and the Python packages of data/prepare.py, and makes an empty folder OUT.
LC_ALL=C
export LC_ALL
TRAIN=${TRAIN:-./train} PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/$RECIPE}
[ ! -e "$OUT" ] || [ "$OUT" = "build/$RECIPE" ] || { echo "$RECIPE.sh: $OUT: exists already; name another OUT" >&2; exit 1; }
[ -x "$TRAIN" ] || { echo "$RECIPE.sh: there is no $TRAIN; make builds it" >&2; exit 1; }
"$PYTHON" -c 'import tokenizers, jinja2, numpy' 2>/dev/null || {
    echo "$RECIPE.sh: $PYTHON lacks tokenizers, jinja2 or numpy; pip install them, or name another with PYTHON=..." >&2
    exit 1
}
rm -rf "$OUT"
mkdir -p "$OUT"
"$PYTHON" scripts/recipes/toy_tokenizer.py "$OUT/tokenizer"

say() { printf '\n== %s\n' "$1"; }
prepare() { "$PYTHON" data/prepare.py --tokenizer "$OUT/tokenizer" "$@"; }
# Prints the --init of a small model. SIZE: its hidden_size
small_model() {
    printf 'llama,hidden_size=%d,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=4,head_dim=%d,intermediate_size=%d,' \
        "$SIZE" $((SIZE / 4)) $((2 * SIZE))
    echo vocab_size=272,max_position_embeddings=65536,rope_theta=10000
}
