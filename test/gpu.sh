# Sourced by test/run.sh --gpu: requirements, link flags of ./train, and the record of what ran.
#
# The record is dev/results/test-<device>-<date>.json, written after each row. Runs add up in one file while sources and
# libraries stay the same; it is complete with all rows. scripts/tables.py makes a table of these files.
# RESULTS: another folder. COMMIT: its name if there is no git.
NVCC=${NVCC:-nvcc} MAKE=${MAKE:-make} LIMIT=${LIMIT:-540} RESULTS=${RESULTS:-dev/results}
ALL_CASES=${ALL_CASES:-1} # of lists that `make test` thins to save CPU time
CUDA_DEVICE_ORDER=PCI_BUS_ID # the order of nvidia-smi
export CC NVCC MAKE LIMIT ALL_CASES CUDA_DEVICE_ORDER
if [ -z "$build_only" ] && ! timeout 60 nvidia-smi -L 2>/dev/null | grep -q '^GPU 0'; then
    echo "test-gpu: no GPU was found (nvidia-smi lists none), so nothing was tested; 'make test' runs the kernels on the CPU" >&2
    exit 1
fi
command -v "$NVCC" >/dev/null || { echo "test-gpu: $NVCC was not found: install the CUDA toolkit, or give NVCC=path" >&2; exit 1; }
if [ -z "${NVCC_LINK:-}" ]; then # how make links ./train
    $MAKE --no-print-directory -s BACKEND=cuda ${ARCHS:+"ARCHS=$ARCHS"} --eval \
        'test-gpu-link: ; @echo "NVCC_LINK $(NVCC) -ccbin $(CXX) $(GENCODE)"; echo "NVCC_LIBS $(NVCC_LIBS)"' test-gpu-link >"$run/link" ||
        { cat "$run/link"; exit 1; }
    NVCC_LINK=$(sed -n 's/^NVCC_LINK //p' "$run/link")
    NVCC_LIBS=$(sed -n 's/^NVCC_LIBS //p' "$run/link")
fi
export NVCC_LINK NVCC_LIBS

# The record's first lines; a file that begins otherwise is of another device, day or tree.
record_begin() {
    gpu_number=${CUDA_VISIBLE_DEVICES:-0}
    ask() { timeout 60 nvidia-smi -i "${gpu_number%%,*}" --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -n 1; }
    device=$(ask name)
    date=$(date -u +%Y-%m-%d)
    commit=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
    [ -z "$(git status --porcelain --untracked-files=no 2>/dev/null)" ] || commit="$commit, edited"
    result=$RESULTS/test-$(echo "$device" | tr 'A-Z ' 'a-z-' | tr -dc 'a-z0-9-')-$date.json
    sources=$(find Makefile train_gpt.cu streambp.h llmc test -type f | LC_ALL=C sort | xargs cat | cksum | cut -d ' ' -f 1)
    libraries=$(scripts/cuda_libraries.sh report 2>&1 | # those of the build
        sed -n 's/^ *cuBLASLt *\([0-9.]*\):.*/cuBLASLt \1/p; s/^ *cuDNN *\([0-9.]*\), front end.*/cuDNN \1/p' | paste -sd , | sed 's/,/, /')
    {
        printf '{\n  "kind": "test", "op_set": "cuda",\n'
        printf '  "device": "%s", "driver": "%s",\n' "$device" "$(ask driver_version)"
        printf '  "cuda": "%s", "libraries": "%s",\n' "$($NVCC --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')" "$libraries"
        printf '  "date": "%s", "commit": "%s", "sources": "%s",\n' "$date" "$commit" "$sources"
    } >"$run/head"
    # The keys of all rows, and of those of this run
    sed 's/#.*//' test/rows.txt | while read -r program precisions library rest; do
        case $library in gpu | gpu-script | sanitizer) ;; *) continue ;; esac
        for precision in $(echo "$precisions" | tr , ' '); do
            read_row $program $precision $library $rest
            record_key
        done
    done >"$run/all_keys"
    while read -r line; do
        read_row $line
        record_key
    done <"$run/rows" >"$run/keys"
    : >"$run/programs"
    [ -f "$result" ] && [ "$(head -n "$(wc -l <"$run/head")" "$result")" = "$(cat "$run/head")" ] &&
        grep '^    {"program"' "$result" | sed 's/,$//' | grep -vF -f "$run/keys" >"$run/programs"
    return 0
}
record_key() { printf '    {"program": "%s", "precision": "%s",\n' "$name" "$precision"; }
record_row() { # of the last row
    calls=$(sed -n 's/^ *cuDNN took \([0-9]*\) calls forward, \([0-9]*\) backward.*/\1 \2/p' "$log.log" | tail -n 1)
    links=$(sed -n 's/^[a-zA-Z]* *host memory link *\([0-9.]*\) GB\/s to it, \([0-9.]*\) from it.*/, "to_host_gb_per_s": \1, "from_host_gb_per_s": \2/p
        s/^[a-zA-Z]* *disk *\([0-9.]*\) GB\/s written, \([0-9.]*\) read.*/, "disk_written_gb_per_s": \1, "disk_read_gb_per_s": \2/p' "$log.log" | tr -d '\n')
    printf '%s "passed": %s, "failed": %s, "skipped": %s%s%s}\n' "$(record_key)" "$row_passed" "$row_failed" "$row_skipped" \
        "${calls:+, \"cudnn_calls\": $((${calls% *} + ${calls#* }))}" "$links" >>"$run/programs"
    record_write
}
record_write() {
    complete=true
    while read -r line; do grep -qF "$line" "$run/programs" || complete=false; done <"$run/all_keys"
    # how the bf16 op set computed attention, by cuDNN's calls
    attention=$(sed -n 's/.*"attention", "precision": "bf16".*"cudnn_calls": \([0-9]*\).*/\1/p' "$run/programs")
    case $attention in '') attention=unknown ;; 0) attention=own ;; *) attention=cudnn ;; esac
    mkdir -p "$RESULTS"
    {
        cat "$run/head"
        awk -F'"(passed|failed|skipped)": ' '{ p += $2; f += $3; s += $4 }
            END { printf "  \"passed\": %d, \"failed\": %d, \"skipped\": %d,\n", p, f, s }' "$run/programs"
        printf '  "complete": %s, "attention": "%s",\n  "programs": [\n' $complete $attention
        sed '$!s/$/,/' "$run/programs"
        printf '  ]\n}\n'
    } >"$result.new" && mv "$result.new" "$result"
}
record_end() {
    grep -E 'cuDNN|our own kernels' build/test-gpu-*/script-bp.log 2>/dev/null | sed 's/.*\.log:/bp: /'
    echo "written: $result$(grep -q '"complete": true' "$result" || echo ', not complete: the other parts have not run')"
}
[ -n "$build_only" ] || record_begin
