#!/bin/sh
# What a user does with a machine of his own. `train doctor --report`: a record that scripts/add_report.py takes; records of another
# form, which it refuses in one line. scripts/recipes/colab.ipynb: its cells are scripts/notebook.py's, and run on a small model.
# scripts/kubernetes_train.yaml: one GPU, a volume, options that the program knows, a run that is stopped and continued.
. test/cli.sh
. test/find_python.sh
TRAIN=$TRAIN_PLAIN
succeeds doctor --report --init $TINY --seq-len 16
says err '^ok     pass  .*16 tokens in .* planned, ' '^report   the line above; nothing was sent'
check 'one line' [ "$(wc -l <"$WORK/out")" = 1 ]
mkdir "$WORK/results"
cp "$WORK/out" "$WORK/report.json"
check 'its bytes are those of a plan' [ "$(json plan_bytes)" = "$("$TRAIN" plan --for bp --json --quiet $(sed 's/.*"options": "\([^"]*\) --repeat 3".*/\1/' "$WORK/out") | sed 's/.*"total_bytes": \([0-9]*\).*/\1/')" ]
check 'records, right and wrong' python3 test/scripts/test_reports.py "$WORK/report.json" "$WORK/results"
check 'the notebook is made of its cells' python3 scripts/notebook.py --check

# ---- the notebook, by a pip, an hf and a streambp of this checkout ----------------------------------------------------------------------
find_python "$DATA_MODULES"
if [ -n "$python" ]; then
    program=$(realpath "$TRAIN") root=$PWD
    case $python in /*) ;; */*) python=$root/$python ;; *) python=$(command -v "$python") ;; esac
    vocabulary=$("$python" test/scripts/example_files.py "$WORK/files")
    mkdir -p "$WORK/bin" "$WORK/colab"
    touch "$WORK/colab/streambp_c-0.1+cuda-py3-none-any.whl"
    cat >"$WORK/bin/pip" <<END
#!/bin/sh
case "\$*" in 'install --quiet streambp-c[cuda] @ file://$WORK/colab/streambp_c-0.1+cuda-py3-none-any.whl huggingface_hub') ;; *) exit 1 ;; esac
cat >'$WORK/bin/streambp' <<'PROGRAM'
#!/bin/sh
[ "\$1" != prepare ] || { shift && exec '$python' '$root/data/prepare.py' "\$@"; }
[ "\$1" != doctor ] || set -- "\$@" --init $TINY --seq-len 16 # real widths take a minute on a CPU
exec '$program' "\$@"
PROGRAM
chmod +x '$WORK/bin/streambp'
END
    cat >"$WORK/bin/hf" <<END
#!/bin/sh
[ "\$*" = 'download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B' ] || exit 1
'$program' convert --out Qwen3-0.6B --quiet --init qwen3,hidden_size=64,intermediate_size=128,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,head_dim=16,vocab_size=$vocabulary
cp '$WORK/files/tokenizer'/* Qwen3-0.6B
END
    chmod +x "$WORK/bin/pip" "$WORK/bin/hf"
    cells=$(python3 -c 'import json; print(sum(cell["cell_type"] == "code" for cell in json.load(open("scripts/recipes/colab.ipynb"))["cells"]))')
    check 'the notebook has cells' [ "$cells" -ge 6 ]
    for cell in $(seq "$cells"); do
        python3 -c 'import json, sys; print("".join([cell for cell in json.load(open("scripts/recipes/colab.ipynb"))["cells"] if cell["cell_type"] == "code"][int(sys.argv[1]) - 1]["source"]))' \
            "$cell" | sed '1{/^%%bash$/!q1;d}' >"$WORK/cell"
        (cd "$WORK/colab" && PATH="$WORK/bin:$PATH" OMP_NUM_THREADS=1 bash -e "$WORK/cell" >"$WORK/out" 2>"$WORK/err")
        check "cell $cell runs: $(tail -n 1 "$WORK/err")" [ $? = 0 ]
    done
    check 'the model is tuned' grep -q '"val_loss"' "$WORK/colab/run/log.jsonl"
    check 'and in a folder' [ -s "$WORK/colab/Qwen3-0.6B-tuned/model.safetensors" ]
else
    skip "the notebook's cells" 'no Python has tokenizers, jinja2 and numpy (pip install tokenizers jinja2 numpy)'
fi

# ---- the job --------------------------------------------------------------------------------------------------------------------------
if python3 -c 'import yaml' 2>/dev/null; then
    python3 - <<'END' >"$WORK/job" || fail 'the job is no YAML of that form'
import yaml
spec = yaml.safe_load(open("scripts/kubernetes_train.yaml"))["spec"]["template"]["spec"]
one = spec["containers"][0]
assert one["resources"]["limits"] == {"nvidia.com/gpu": 1} and spec["restartPolicy"] == "Never"
assert one["volumeMounts"][0]["name"] == spec["volumes"][0]["name"] and all(type(word) is str for word in one["args"])
assert spec["terminationGracePeriodSeconds"] > float(one["args"][one["args"].index("--grace") + 1])
print("\n".join(one["args"]))
END
    mkdir -p "$WORK/pod/shards"
    cp $SHARD "$WORK/pod/shards/train-0.bin"
    "$TRAIN" convert --init $TINY --out "$WORK/pod/model" --quiet 2>/dev/null
    program=$(realpath "$TRAIN")
    pod() { # steps
        cd "$WORK/pod" || exit 1
        set -- --seq-len 32 --schedule constant --steps "$1"
        while IFS= read -r word; do words="${words:-} '$word'"; done <"$WORK/job"
        eval "exec '$program' $words $*" >"$WORK/out" 2>&1
    }
    (pod 1000000) &
    for _ in $(seq 300); do grep -qs '"step": 3,' "$WORK/pod/run/log.jsonl" && break || sleep 0.2; done
    kill -TERM $!
    wait $!
    check 'a pod that is moved has not ended its work' [ $? = 143 ]
    last=$(tail -n 1 "$WORK/pod/run/log.jsonl" | sed 's/.*"step": \([0-9]*\).*/\1/')
    (pod $((last + 2)))
    check 'the next pod goes on' [ $? = 0 -a "$(grep -c '"options"' "$WORK/pod/run/log.jsonl")" = 2 ]
else
    skip 'the job of a batch service' 'python3 has no yaml (Debian, Ubuntu: python3-yaml)'
fi
finish
