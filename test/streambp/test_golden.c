/*
Models from Hugging Face against transformers in float64: loss and every parameter's gradient, for each method and
several chunk sizes, over packed documents with masks (test/golden/README.md). And the gradients we write are those,
under the same names and in the same shapes. Under mpirun the ranks share each stream, but for the run of method full
that bf16 is held against.
*/
#include "llmc/files/gradients.h"
#include "llmc/ranks/dist.h"
#include "test/base/testing.h"
#include "test/model/tiny.h"
#include "llmc/files/weights.h"
#include <unistd.h>

#define GOLDEN "test/golden/"

typedef struct {
    InputFile file;
    SafeTensors list;
} Reference;

static Reference reference_open(const char *path) {
    Reference reference;
    memset(&reference, 0, sizeof(reference));
    reference.file = input_open(path);
    safetensors_read_header(&reference.list, &reference.file, 0);
    safetensors_sort(&reference.list);
    return reference;
}

static void reference_close(Reference *reference) {
    safetensors_free(&reference->list);
    input_close(&reference->file);
}

// The tensor's elements, 4 bytes each (I32 or F32).
static void *reference_read(const Reference *reference, const char *name, size_t *count) {
    SafeTensor *tensor = safetensors_find(&reference->list, name);
    void *values;
    if (!tensor) test_fail("the reference has no tensor %s", name);
    *count = (size_t)(tensor->end - tensor->begin) / 4;
    values = checked_malloc(*count * 4, name);
    input_read(&reference->file, tensor->begin, values, *count * 4);
    return values;
}

static Batch reference_batch(const Reference *reference) {
    size_t N, documents, n, d;
    int32_t *tokens = (int32_t *)reference_read(reference, "tokens", &N);
    int32_t *targets = (int32_t *)reference_read(reference, "targets", &n);
    float *weights = (float *)reference_read(reference, "loss_weight", &n);
    int32_t *start = (int32_t *)reference_read(reference, "doc_start", &documents);
    Batch batch = batch_allocate(N, documents);
    for (d = 0; d < documents; d++) batch.document_start[d] = (size_t)start[d];
    batch_set_positions(&batch);
    memcpy(batch.tokens, tokens, N * 4);
    memcpy(batch.targets, targets, N * 4);
    memcpy(batch.loss_weight, weights, N * 4);
    free(tokens), free(targets), free(weights), free(start);
    return batch;
}

// The reference's gradients in memory order.
static double *reference_gradients(const Reference *reference, const Model *model) {
    double *gradients = (double *)checked_malloc(model->elements * sizeof(double), "gradients");
    size_t i, j, count;
    for (i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        char name[192];
        float *values;
        snprintf(name, sizeof(name), "grad.%s", p->name);
        values = (float *)reference_read(reference, name, &count);
        if (count != parameter_elements(p))
            test_fail("%s has %zu elements, not %zu", name, count, parameter_elements(p));
        for (j = 0; j < count; j++) {
            size_t row = p->cols ? j / p->cols : j, col = p->cols ? j % p->cols : 0;
            gradients[p->offset + j] = (double)values[p->transposed ? col * p->rows + row : j];
        }
        free(values);
    }
    return gradients;
}

static double total_error(const double *found, const double *expected, size_t begin, size_t count) {
    double difference = 0, size = 0;
    size_t i;
    for (i = begin; i < begin + count; i++) {
        difference += (found[i] - expected[i]) * (found[i] - expected[i]);
        size += expected[i] * expected[i];
    }
    return sqrt(difference / size);
}

static double *source_weights(const WeightSource *source, const Model *model) {
    double *weights = (double *)checked_malloc(model->elements * sizeof(double), "weights");
    size_t i;
    for (i = 0; i < model->parameter_count; i++)
        weights_read(source, i, 0, parameter_elements(&model->parameters[i]), DTYPE_FP64,
                     weights + model->parameters[i].offset);
    return weights;
}

typedef struct {
    Method method;
    size_t chunk, logits_chunk;
} Variant;

// Under mpirun all ranks share the stream; ring: keys and values are passed around.
static TinyResult shared_run(const Model *model, const double *weights, Variant v, size_t ring, const Batch *batch) {
    RunSettings settings;
    memset(&settings, 0, sizeof(settings));
    settings.model = model, settings.gradient_type = model->dtype;
    settings.method = v.method, settings.chunk = v.chunk, settings.logits_chunk = v.logits_chunk;
    settings.world.ranks = settings.world.sp = dist_ranks(), settings.world.rank = dist_rank();
    settings.ring = ring != 0;
    return tiny_run_on(ops_device, settings, weights, batch, 1);
}

static const Variant variants[] = {
    {METHOD_FULL, 0, 0},     {METHOD_CHECKPOINT, 0, 0}, {METHOD_STREAM, 1, 1},       {METHOD_STREAM, 7, 5},
    {METHOD_STREAM, 17, 32}, {METHOD_STREAM, 27, 81},   {METHOD_STREAM, 1000, 1000},
};

static void expect_close(const Model *model, TinyResult found, double loss, const double *gradients, double allowed) {
    size_t i;
    if (!(fabs(found.loss - loss) <= allowed * loss)) test_fail("loss %.9g, transformers has %.9g", found.loss, loss);
    for (i = 0; i < model->parameter_count; i++) {
        double error = tiny_difference(&model->parameters[i], found.gradient, gradients);
        testing.worst = fmax(testing.worst, error / allowed);
        if (!(error <= allowed))
            test_fail("gradient of %s is off by %.3g, allowed %.3g", model->parameters[i].name, error, allowed);
    }
}

// bf16: no method may be worse than full in the same build, by more than design allows.
static void expect_no_worse(const Model *model, TinyResult found, TinyResult full, const double *gradients) {
    double error = total_error(found.gradient, gradients, 0, model->elements);
    double error_full = total_error(full.gradient, gradients, 0, model->elements);
    size_t i;
    testing.worst = fmax(testing.worst, error / (1.05 * error_full));
    if (!(error_full < 0.05)) test_fail("full is off by %.3g", error_full);
    if (!(error <= 1.05 * error_full)) test_fail("off by %.4g, full by %.4g", error, error_full);
    for (i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        if (parameter_elements(p) < 4096) continue;
        error = total_error(found.gradient, gradients, p->offset, parameter_elements(p));
        error_full = total_error(full.gradient, gradients, p->offset, parameter_elements(p));
        if (!(error <= 1.2 * error_full)) test_fail("%s is off by %.4g, with full by %.4g", p->name, error, error_full);
    }
}

static void golden(const char *model_path, const char *reference_path) {
    WeightSource *source = weights_open(model_path);
    Config config = source->config;
    Model model = model_build(&config, ops_device->stored);
    Reference reference = reference_open(reference_path);
    Batch batch = reference_batch(&reference);
    double *weights = source_weights(source, &model), *gradients = reference_gradients(&reference, &model);
    double allowed = ops_device->stored == DTYPE_FP64 ? 5e-7 : 1e-5;
    TinyResult full = tiny_run(&model, weights, METHOD_FULL, 0, 0, &batch);
    size_t i, count;
    float *loss = (float *)reference_read(&reference, "loss", &count);
    const size_t step = EMULATED || dist_ranks() > 1 ? 2 : 1;
    for (i = EMULATED; i < sizeof(variants) / sizeof(variants[0]); i += step) {
        Variant v = variants[i];
        TinyResult found = shared_run(&model, weights, v, i / 2 % 2, &batch);
        test_case("%s, method %d, chunks %zu and %zu, %zu ranks", model_path, v.method, v.chunk, v.logits_chunk,
                  dist_ranks());
        if (ops_device->stored == DTYPE_BF16)
            expect_no_worse(&model, found, full, gradients);
        else
            expect_close(&model, found, (double)loss[0], gradients, allowed);
        free(found.gradient);
    }
    free(full.gradient), free(loss), free(weights), free(gradients);
    reference_close(&reference);
    batch_free(&batch);
    model_free(&model);
    weights_close(source);
}

#define FOLDER(name) golden(GOLDEN name, GOLDEN name "/reference.safetensors")
TEST(gpt2) { (void)cmocka_state, FOLDER("gpt2"); }
TEST(llama) { FOLDER("llama"); }
TEST(llama_tied) { FOLDER("llama-tied"); }
TEST(qwen2) { FOLDER("qwen2"); }
TEST(qwen3) { FOLDER("qwen3"); }
TEST(mistral) { FOLDER("mistral"); }
TEST(gemma3) { FOLDER("gemma3"); }
TEST(gemma3_linear) { FOLDER("gemma3-linear"); }
#ifndef CUDA_ON_CPU
TEST(llama3) { FOLDER("llama3"); }
TEST(llama_linear) { FOLDER("llama-linear"); }
TEST(qwen2_yarn) { FOLDER("qwen2-yarn"); }
TEST(qwen3_yarn) { FOLDER("qwen3-yarn"); }
TEST(qwen2_sliding) { FOLDER("qwen2-sliding"); }
TEST(mistral_full) { FOLDER("mistral-full"); }
TEST(gpt2_as_published) { FOLDER("gpt2-hub"); }
TEST(gpt2_of_llmc) { golden(GOLDEN "gpt2/gpt2_llmc_fp32.bin", GOLDEN "gpt2/reference.safetensors"); }
TEST(llama_sharded) { FOLDER("llama-sharded"); }
TEST(qwen2_fp16) { FOLDER("qwen2-fp16"); }
TEST(qwen3_bf16) { FOLDER("qwen3-bf16"); }
#endif

// What gradients_write writes has transformers' names and shapes, and these values.
static void written(const char *folder) {
    char path[256], out[] = "/tmp/gradients-XXXXXX";
    WeightSource *source = weights_open(folder);
    Config config = source->config;
    Model model = model_build(&config, ops_device->stored);
    double *weights = source_weights(source, &model);
    Reference reference, found;
    TinyResult full;
    Batch batch;
    size_t i, parameters = 0, bytes = model.elements * dtype_size(model.dtype);
    void *device = ops_device->allocate(bytes);
    int file = mkstemp(out);
    assert_true(file >= 0);
    close(file);
    snprintf(path, sizeof(path), "%s/reference.safetensors", folder);
    reference = reference_open(path);
    batch = reference_batch(&reference);
    full = tiny_run(&model, weights, METHOD_FULL, 0, 0, &batch);
    device_write(ops_device, device, model.dtype, full.gradient, model.elements);
    gradients_write(out, NULL, &model, world_alone(), ops_device, device, model.dtype);
    found = reference_open(out);
    for (i = 0; i < reference.list.count; i++) {
        const SafeTensor *expected = &reference.list.tensors[i], *tensor;
        float *a, *b;
        double difference = 0, size = 0;
        size_t count, j;
        if (strncmp(expected->name, "grad.", 5) != 0) continue;
        parameters++;
        tensor = safetensors_find(&found.list, expected->name + 5);
        if (!tensor) test_fail("%s was not written", expected->name + 5);
        if (strcmp(tensor->dtype, "F32") != 0) test_fail("%s was written as %s", tensor->name, tensor->dtype);
        if (tensor->rank != expected->rank ||
            memcmp(tensor->shape, expected->shape, tensor->rank * sizeof(uint64_t)) != 0)
            test_fail("%s has shape %s, not %s", tensor->name, shape_text(tensor->shape, tensor->rank),
                      shape_text(expected->shape, expected->rank));
        a = (float *)reference_read(&found, tensor->name, &count);
        b = (float *)reference_read(&reference, expected->name, &count);
        for (j = 0; j < count; j++) {
            difference += ((double)a[j] - (double)b[j]) * ((double)a[j] - (double)b[j]);
            size += (double)b[j] * (double)b[j];
        }
        if (!(sqrt(difference / size) <= (ops_device->stored == DTYPE_BF16 ? 0.1 : 1e-5)))
            test_fail("%s: written gradient is off by %.3g", tensor->name, sqrt(difference / size));
        free(a), free(b);
    }
    if (found.list.count != parameters) test_fail("%zu tensors were written, not %zu", found.list.count, parameters);
    unlink(out);
    ops_device->release(device, bytes);
    reference_close(&reference), reference_close(&found);
    free(full.gradient), free(weights);
    batch_free(&batch);
    model_free(&model);
    weights_close(source);
}

TEST(written_gpt2) { written(GOLDEN "gpt2"); }
#ifndef CUDA_ON_CPU
TEST(written_llama) { written(GOLDEN "llama"); }
TEST(written_qwen3) { written(GOLDEN "qwen3"); }
TEST(written_gemma3) { written(GOLDEN "gemma3"); }
#endif

int main(int argc, char **argv) {
    dist_start();
    dist_split(dist_ranks());
    RUN_LISTED(argc, argv, NULL);
}
