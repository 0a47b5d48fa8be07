/*
Weights in files: golden models of every format and type element by element, ranges, flat files, gradients against
transformers', output that is complete or absent. Wrong files are tested in test_weights_bad.c, tensors of many slabs in
test_convert.c.
*/
#include "llmc/files/gradients.h"
#include "convert_files.h"
#include "test/ops/fence.h"

static const DType memory_types[] = {DTYPE_FP32, DTYPE_BF16, DTYPE_FP64};

// ---- reading --------------------------------------------------------------------------------------------------------
TEST(golden_files_are_read) {
    for (size_t g = 0; g < GOLDEN_MODELS; g++) {
        const GoldenModel *golden = &golden_models[g];
        WeightSource *source = weights_open(golden_path(golden->name));
        Config expected_config = config_from_text(golden->text, "test", EXIT_USAGE);
        const char *files[8];
        test_case("%s", golden->name);
        expect_same_config(&source->config, &expected_config);
        assert_int_equal(source->dtype, golden->dtype);
        assert_int_equal(source->model.dtype, golden->dtype);
        assert_int_equal(source->file_count, golden->files);
        assert_int_equal(*source->remark != 0, expected_config.family->learned_positions); // GPT-2's asks for dropout
        golden_files(golden, files);
        for (size_t i = 0; i < source->model.parameter_count; i++) {
            const Parameter *p = &source->model.parameters[i];
            FoundTensor tensor = golden_tensor(golden, files, "", p);
            for (size_t t = 0; t < 3; t++) {
                const void *values = read_parameter(source, i, memory_types[t]);
                for (size_t j = 0; j < parameter_elements(p); j++) {
                    double expected = round_to(memory_types[t], found_parameter_value(&tensor, p, j));
                    double found = element_to_double(values, memory_types[t], j);
                    if (found != expected)
                        test_fail("%s[%zu] as %s is %.17g, expected %.17g", p->name, j, dtype_name(memory_types[t]),
                                  found, expected);
                }
            }
        }
        weights_close(source);
    }
}

// Any range of any parameter equals that piece of the whole, transposed or not, converted or not. llm.c's whole equals
// the golden folder's. Two have added rows.
TEST(any_range) {
    static const char *const names[] = {"gpt2",        "qwen2-fp16", "gpt2/gpt2_llmc_bf16.bin",
                                        "llama",       "qwen3-bf16", "qwen3_next",
                                        "olmo_hybrid", "nemotron_h", "granitemoehybrid"};
    for (size_t f = 0; f < COUNT_OF(names); f++) {
        WeightSource *source = weights_open(golden_path(names[f]));
        if (f == 3 || f == 4) source_grow(source, source->config.vocab_size + 7);
        test_case("%s", names[f]);
        for (size_t i = 0; i < source->model.parameter_count; i++) {
            size_t count = parameter_elements(&source->model.parameters[i]);
            for (size_t t = 0; t < 3; t++) {
                size_t size = dtype_size(memory_types[t]);
                const char *whole = (const char *)read_parameter(source, i, memory_types[t]);
                char *piece = (char *)case_memory((count + 1) * size);
                for (size_t k = 0; k < 20; k++) {
                    size_t begin = test_random_below(count + 1), n = test_random_below(count - begin + 1);
                    memset(piece, 0x5a, (count + 1) * size);
                    weights_read(source, i, begin, n, memory_types[t], piece);
                    if (memcmp(piece, whole + begin * size, n * size) != 0 || (unsigned char)piece[n * size] != 0x5a)
                        test_fail("%s: elements %zu to %zu", source->model.parameters[i].name, begin, begin + n);
                }
            }
        }
        weights_close(source);
    }
    expect_same_weights(GOLDEN "gpt2", GOLDEN "gpt2/gpt2_llmc_fp32.bin", DTYPE_FP32);
    expect_same_weights(GOLDEN "gpt2", GOLDEN "gpt2/gpt2_llmc_bf16.bin", DTYPE_BF16);
}

// ---- conversion -----------------------------------------------------------------------------------------------------
// A flat .bin holds the elements at the documented offsets; it reads back as the same model, and so does its copy.
TEST(flat_files) {
    for (size_t g = 0; g < GOLDEN_MODELS; g++) {
        const char *original = golden_path(golden_models[g].name), *path = scratch_path("flat.bin");
        WeightSource *source = weights_open(original);
        const DType types[] = {DTYPE_FP32, DTYPE_BF16, golden_models[g].dtype};
        for (size_t t = 0; t < 3; t++) {
            size_t size = dtype_size(types[t]), bytes;
            test_case("%s as %s", golden_models[g].name, dtype_name(types[t]));
            weights_convert(source, path, types[t]);
            const char *file = read_whole(path, &bytes);
            assert_int_equal(bytes, 4096 + source->model.elements * size);
            for (size_t i = 0; i < source->model.parameter_count; i++) {
                const Parameter *p = &source->model.parameters[i];
                if (memcmp(file + 4096 + p->offset * size, read_parameter(source, i, types[t]),
                           parameter_elements(p) * size) != 0)
                    test_fail("%s differs", p->name);
            }
            expect_same_weights(original, path, types[t]);
            convert_flat(path, scratch_path("again.bin"));
            expect_same_bytes(path, scratch_path("again.bin"));
        }
        weights_close(source);
    }
}

// ---- gradients ------------------------------------------------------------------------------------------------------
// Writes transformers' gradients from our order in device memory; they must come out as transformers wrote them.
TEST(gradients_as_transformers_has_them) {
    static const char *const names[] = {"gpt2",    "gpt2-hub",   "llama",       "llama-sharded", "llama-tied",

                                        "qwen2",   "qwen3",      "qwen3-bf16",  "phi3",          "gemma3",

                                        "qwen3_5", "qwen3_next", "olmo_hybrid", "nemotron_h",    "granitemoehybrid",
                                        "bamba"};
    const Ops *ops = ops_fenced();
    for (size_t k = 0; k < 3 * COUNT_OF(names); k++) {
        const GoldenModel reference = {names[k / 3], NULL, DTYPE_FP32, 1};
        const DType stored = memory_types[k % 3];
        const char *out = scratch_path("gradients.safetensors");
        char remark[256];
        if (!all_cases() && k / 3 % 3 != k % 3 && k >= 3) continue;
        test_case("%s, %s", reference.name, dtype_name(stored));
        const Config config = hf_directory_config(golden_path(reference.name), remark, sizeof(remark));
        Model model = model_build(&config, ops->stored);
        const size_t bytes = model.elements * dtype_size(stored);
        void *host = case_memory(bytes), *device = ops->allocate(bytes);
        const char *file = read_in(golden_path(reference.name), "reference.safetensors", NULL);
        for (size_t i = 0; i < model.parameter_count; i++) {
            const Parameter *p = &model.parameters[i];
            const FoundTensor tensor = golden_tensor(&reference, &file, "grad.", p);
            for (size_t j = 0; j < parameter_elements(p); j++)
                element_write(host, stored, p->offset + j, found_parameter_value(&tensor, p, j));
        }
        ops->copy_in(device, host, bytes);
        allocation_guard = 1;
        gradients_write(out, NULL, &model, world_alone(), ops, device, stored);
        allocation_guard = 0;
        const char *written = read_whole(out, NULL);
        for (size_t i = 0; i < model.parameter_count; i++) {
            const Parameter *p = &model.parameters[i];
            const FoundTensor expected = golden_tensor(&reference, &file, "grad.", p);
            const FoundTensor found = golden_tensor(&reference, &written, "", p);
            assert_true(found.type == DTYPE_FP32 && found.rank == expected.rank);
            assert_memory_equal(found.shape, expected.shape, sizeof(found.shape));
            for (size_t j = 0; j < parameter_elements(p); j++)
                if (found_value(&found, j) != round_to(stored, found_value(&expected, j)))
                    test_fail("%s[%zu] is %.9g, expected %.9g", p->name, j, found_value(&found, j),
                              found_value(&expected, j));
        }
        ops->release(device, bytes);
        model_free(&model);
    }
}

static void check_globs(const void *context) {
    Model model = model_of("gpt2,num_hidden_layers=2", DTYPE_FP32);
    gradients_check_globs((const char *)context, &model);
}

// Our reader accepts the output of gradients_write, including transposed matrices of several slabs. With globs the file
// holds these parameters, each with the bytes of the full file.
TEST(gradients_of_globs) {
    static const struct {
        const char *globs;
        size_t count; // gpt2 with two layers has 28
    } cases[] = {{NULL, 28}, {"transformer.ln_f.*", 2}, {"*.h.1.*,*.h.0.ln_?.weight", 14}, {"*.wte.*,*wte*", 1}};
    const Ops *ops = ops_fenced();
    Model model = model_of("gpt2,n_embd=516,n_head=4,vocab_size=9,n_positions=16,num_hidden_layers=2", ops->stored);
    const char *path = scratch_path("gradients.safetensors");
    size_t bytes = model.elements * sizeof(float), written;
    float *host = (float *)checked_malloc(bytes, "gradients");
    void *device = ops->allocate(bytes);
    for (size_t i = 0; i < model.elements; i++) host[i] = (float)formula(i);
    ops->copy_in(device, host, bytes);
    for (size_t c = 0; c < COUNT_OF(cases); c++) {
        const char *globs = cases[c].globs;
        SafeTensors list = {NULL, 0};
        test_case("%s", globs ? globs : "all");
        if (globs) gradients_check_globs(globs, &model);
        gradients_write(path, globs, &model, world_alone(), ops, device, DTYPE_FP32);
        InputFile input = input_open(path);
        safetensors_read_header(&list, &input, 0);
        assert_int_equal(list.count, cases[c].count);
        const char *file = read_whole(path, &written);
        size_t count = 0, expected = (size_t)gradients_write_header(NULL, globs, &model).data;
        for (size_t i = 0; i < model.parameter_count; i++) {
            const Parameter *p = &model.parameters[i];
            FoundTensor found;
            if (!find_tensor(file, p->name, &found)) continue;
            count++, expected += parameter_elements(p) * sizeof(float);
            expect_formula(&found, p);
        }
        if (count != cases[c].count) test_fail("%zu tensors, not %zu", count, cases[c].count);
        assert_int_equal(written, expected);
        safetensors_free(&list);
        input_close(&input);
    }
    expect_refused(check_globs, "*.h.1.*,*.h.2.*", EXIT_USAGE, "--grads-of: '*.h.2.*' matches no parameter");
    expect_refused(check_globs, ",*", EXIT_USAGE, "--grads-of: '' matches no parameter");
    free(host);
    ops->release(device, bytes);
    model_free(&model);
}

// ---- output is complete or absent: cases beyond test_file.c --------------------------------------------------------
// The reservation succeeds, a later write fails.
static void convert_on_a_disk_that_fills(const void *path) {
    WeightSource *source = weights_open(GOLDEN "llama");
    OutputFile output;
    struct rlimit limit = {100000, 100000};
    char block[4096] = {0};
    flat_begin(&output, (const char *)path, &source->model, DTYPE_FP32);
    setrlimit(RLIMIT_FSIZE, &limit);
    for (size_t i = 1; i <= 40; i++) output_write(&output, i * sizeof(block), block, sizeof(block));
    output_commit(&output);
}

TEST(failed_output_leaves_nothing) {
    const char *path = scratch_path("output.bin");
    expect_refused(convert_on_a_disk_that_fills, path, 1, "output.bin: writing 2400 bytes at byte 100000 failed");
    expect_nothing_at(path);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
