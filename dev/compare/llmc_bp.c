/*
One forward and backward pass of llm.c, several times, as a contender of compare.py: llmc_bp.sh converts the model,
builds this against the user's checkout (llmc_bp.h) and starts it. The result is one JSON object, the last line on
standard output; what llm.c prints goes to standard error.
*/
#include "llmc/files/gradients.h"
#include "llmc/data/dataloader.h"
#include "llmc/ranks/dist.c" // without HAVE_MPI: this process is alone
#include "llmc/base/json.h"
#include "llmc/files/weights.h"
#include "llmc_bp.h"

typedef struct {
    const char *checkpoint, *tokens, *version, *grads_out, *grads_of; // grads_of: "GLOB,GLOB", NULL: all
    size_t seq_len, batch, repeat, limit, recompute;
} Arguments;

typedef struct {
    double loss, grad_norm;
    double *seconds; // [repeat]
    size_t peak_bytes;
} Result;

static Arguments arguments_parse(int argc, char **argv) {
    Arguments a = {NULL, NULL, "unknown", NULL, NULL, 0, 1, 3, 0, 1};
    const struct {
        const char *name, **text;
        size_t *number;
    } rows[] = {{"--checkpoint", &a.checkpoint, NULL}, {"--tokens", &a.tokens, NULL},
                {"--version", &a.version, NULL},       {"--grads-out", &a.grads_out, NULL},
                {"--grads-of", &a.grads_of, NULL},     {"--seq-len", NULL, &a.seq_len},
                {"--batch", NULL, &a.batch},           {"--repeat", NULL, &a.repeat},
                {"--memory-limit", NULL, &a.limit},    {"--recompute", NULL, &a.recompute}};
    const size_t count = sizeof(rows) / sizeof(rows[0]);
    size_t row;
    for (int i = 1; i < argc; i += 2) {
        for (row = 0; row < count && strcmp(argv[i], rows[row].name) != 0; row++) continue;
        if (row == count || i + 1 == argc) die_usage("%s: not an option, or without its value", argv[i]);
        if (rows[row].text)
            *rows[row].text = argv[i + 1];
        else if (!parse_size(argv[i + 1], rows[row].number))
            die_usage("%s %s: is not a whole number", argv[i], argv[i + 1]);
    }
    if (!a.checkpoint || !a.tokens || !a.seq_len || !a.batch || !a.repeat)
        die_usage("--checkpoint, --tokens and --seq-len are needed, and no number is 0");
    return a;
}

// ---- gradients ----------------------------------------------------------------------------------------------------
// All of them in the order of the parameter table. llm.c's run of parameters lies as in its checkpoint, `source`.
static float *gradients_read(const WeightSource *source) {
    const Model *model = &source->model;
    float *gradients = (float *)checked_calloc(model->elements, sizeof(float), "the gradients");
    for (size_t i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        const TensorLocation *place = &source->places[i];
        const uint64_t first = (place->offset - LLMC_HEADER_INTS * sizeof(int32_t)) / dtype_size(place->type);
        peer_gradients((size_t)first, parameter_elements(p), gradients + p->offset);
    }
    return gradients;
}

static double norm_of(const float *values, size_t count) {
    double sum = 0;
    for (size_t i = 0; i < count; i++) sum += (double)values[i] * (double)values[i];
    return sqrt(sum);
}

static void copy_from_host(void *out, const void *in, size_t bytes) { memcpy(out, in, bytes); }

// ---- the passes and their result ----------------------------------------------------------------------------------
// Loads the first B x T tokens, each with the next one as its target.
static Batch tokens_read(const Arguments *a, size_t vocab_size) {
    DataSettings settings = {0};
    settings.B = a->batch, settings.T = a->seq_len, settings.vocab_size = vocab_size;
    settings.shuffle = SHUFFLE_OFF;
    DataLoader loader = dataloader_open(&a->tokens, 1, &settings);
    if (!loader.regular) die("%s: holds documents of any length; give one of llm.c's shards", a->tokens);
    Batch batch = dataloader_batch(&loader);
    dataloader_next(&loader, &batch);
    dataloader_close(&loader);
    return batch;
}

// result NULL: it did not fit into memory
static void result_print(FILE *file, const Arguments *a, const Result *result) {
    JsonOut json = json_open(file);
    json_text(&json, "contender", "llmc");
    if (result) {
        json_number(&json, "loss", result->loss);
        json_number(&json, "grad_norm", result->grad_norm);
        json_numbers(&json, "seconds", result->seconds, a->repeat);
        json_size(&json, "peak_bytes", result->peak_bytes);
    }
    json_text(&json, "peak_of", peer_peak_of);
    json_text(&json, "attention", peer_attention);
    json_text(&json, "dtype", peer_dtype);
    json_object(&json, "versions");
    json_text(&json, "llm.c", a->version);
    json_object_end(&json);
    json_text(&json, "error", result ? NULL : "out of memory");
    json_finish(&json);
}

int main(int argc, char **argv) {
    const Arguments a = arguments_parse(argc, argv);
    const PeerSettings settings = {a.batch, a.seq_len, a.limit, (int)a.recompute};
    FILE *out = fdopen(dup(STDOUT_FILENO), "w");
    WeightSource *source = weights_open(a.checkpoint);
    const size_t positions = source->config.max_position_embeddings;
    const World alone = {0, 0, 0, 0};
    Result result;
    if (!out || dup2(STDERR_FILENO, STDOUT_FILENO) < 0) die("standard output: %s", strerror(errno));
    if (a.seq_len > positions)
        die("--seq-len %zu: this model has %zu positions, and llm.c reads none beyond; give a shorter one", a.seq_len,
            positions);
    if (a.grads_out) gradients_check_globs(a.grads_of, &source->model);
    Ops host = {0};
    host.copy_out = copy_from_host; // gradients_write needs no more
    Batch batch = tokens_read(&a, source->config.vocab_size);
    result.seconds = (double *)checked_calloc(a.repeat, sizeof(double), "timings");
    if (!peer_open(a.checkpoint, &settings)) {
        result_print(out, &a, NULL);
        return 0;
    }
    for (size_t i = 0; i < a.repeat; i++) result.loss = peer_pass(batch.tokens, batch.targets, &result.seconds[i]);
    result.peak_bytes = peer_peak_bytes();
    float *gradients = gradients_read(source);
    result.grad_norm = norm_of(gradients, source->model.elements);
    if (a.grads_out) gradients_write(a.grads_out, a.grads_of, &source->model, alone, &host, gradients, DTYPE_FP32);
    result_print(out, &a, &result);
    return 0;
}
