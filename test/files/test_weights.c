/*
Weights in files: golden models of every format and type element by element, ranges, large tensors, conversion,
gradients against transformers', output that is complete or absent, bounded memory. Files that are wrong are in
test_weights_bad.c.
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
                    double found = element_read(values, memory_types[t], j);
                    if (found != expected)
                        test_fail("%s[%zu] as %s is %.17g, expected %.17g", p->name, j, dtype_name(memory_types[t]),
                                  found, expected);
                }
            }
        }
        weights_close(source);
    }
}

TEST(formats_agree) {
    static const struct {
        const char *one, *other;
        DType compared, dtype; // the other's
    } cases[] = {{GOLDEN "gpt2", GOLDEN "gpt2/gpt2_llmc_fp32.bin", DTYPE_FP32, DTYPE_FP32},
                 {GOLDEN "gpt2", GOLDEN "gpt2/gpt2_llmc_bf16.bin", DTYPE_BF16, DTYPE_BF16},
                 {GOLDEN "gpt2", GOLDEN "gpt2-hub", DTYPE_FP32, DTYPE_FP32},
                 {GOLDEN "llama", GOLDEN "llama-sharded", DTYPE_FP32, DTYPE_FP32},
                 {GOLDEN "qwen3", GOLDEN "qwen3-bf16", DTYPE_BF16, DTYPE_BF16}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        WeightSource *source = weights_open(cases[i].other);
        test_case("%s", cases[i].other);
        assert_int_equal(source->dtype, cases[i].dtype);
        if (text_ends_with(cases[i].other, ".bin")) assert_string_equal(source->format, "llm.c GPT-2 .bin");
        weights_close(source);
        expect_same_weights(cases[i].one, cases[i].other, cases[i].compared);
    }
}

// Any range of any parameter is the same piece of the whole; transposed or not, converted or not.
TEST(any_range) {
    static const char *const names[] = {"gpt2", "qwen2-fp16", "gpt2/gpt2_llmc_bf16.bin"};
    for (size_t f = 0; f < 3; f++) {
        WeightSource *source = weights_open(golden_path(names[f]));
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
}

// Tensors of several slabs, of which a matrix as wide as GPT-2's lies transposed; and type F64.
TEST(large_tensors) {
    Model model = model_of(LARGE_GPT2, DTYPE_FP32);
    static const DType types[] = {DTYPE_FP32, DTYPE_FP64};
    for (size_t t = 0; t < 2; t++) {
        const char *folder = scratch_path("large");
        test_case("%s", dtype_name(types[t]));
        write_formula_model(folder, &model, LARGE_GPT2_JSON, &types[t], 1);
        WeightSource *source = weights_open(folder);
        assert_int_equal(source->dtype, types[t]);
        for (size_t i = 0; i < model.parameter_count; i++) {
            const Parameter *p = &model.parameters[i];
            const float *values = (const float *)read_parameter(source, i, DTYPE_FP32);
            for (size_t j = 0; j < parameter_elements(p); j++)
                if (values[j] != (float)formula(p->offset + j)) test_fail("%s[%zu] is %.9g", p->name, j, values[j]);
        }
        weights_close(source);
        run_command("rm -r '%s'", folder, "");
    }
    model_free(&model);
}

// ---- into and out of device memory ----------------------------------------------------------------------------------
TEST(loading) {
    const Ops *ops = ops_fenced();
    size_t size = dtype_size(ops->stored);
    for (size_t g = 0; g < GOLDEN_MODELS; g++) {
        WeightSource *source = weights_open(golden_path(golden_models[g].name));
        Model model = model_of(golden_models[g].text, ops->stored);
        void *device = load_model(ops, source, &model);
        char *host = (char *)checked_malloc(model.elements * size, "a copy");
        test_case("%s", golden_models[g].name);
        weights_check_finite(&model, sharding_whole(), ops, device);
        ops->copy_out(host, device, model.elements * size);
        for (size_t i = 0; i < model.parameter_count; i++) {
            const Parameter *p = &model.parameters[i];
            const void *expected = read_parameter(source, i, ops->stored);
            if (memcmp(host + p->offset * size, expected, parameter_elements(p) * size) != 0)
                test_fail("%s differs", p->name);
        }
        free(host);
        ops->release(device, model.elements * size);
        model_free(&model);
        weights_close(source);
    }
}

// ---- conversion -----------------------------------------------------------------------------------------------------
TEST(flat_files) {
    for (size_t g = 0; g < GOLDEN_MODELS; g++) {
        WeightSource *source = weights_open(golden_path(golden_models[g].name));
        const DType types[] = {DTYPE_FP32, DTYPE_BF16, golden_models[g].dtype};
        for (size_t t = 0; t < 3; t++) {
            const char *path = scratch_path("flat.bin");
            size_t size = dtype_size(types[t]), bytes;
            test_case("%s as %s", golden_models[g].name, dtype_name(types[t]));
            weights_convert(source, path, types[t]);
            WeightSource *flat = weights_open(path);
            expect_same_config(&flat->config, &source->config);
            assert_int_equal(flat->dtype, types[t]);
            const char *first = read_whole(path, &bytes);
            assert_int_equal(bytes, 4096 + source->model.elements * size);
            for (size_t i = 0; i < source->model.parameter_count; i++) { // read back, and where the format says it lies
                const Parameter *p = &source->model.parameters[i];
                const void *expected_values = read_parameter(source, i, types[t]);
                size_t length = parameter_elements(p) * size;
                if (memcmp(first + 4096 + p->offset * size, expected_values, length) != 0 ||
                    memcmp(read_parameter(flat, i, types[t]), expected_values, length) != 0)
                    test_fail("%s differs", p->name);
            }
            weights_convert(flat, scratch_path("again.bin"), types[t]); // a flat .bin of a flat .bin is the same file
            expect_same_bytes(path, scratch_path("again.bin"));
            weights_close(flat);
        }
        weights_close(source);
    }
}

// ---- gradients ------------------------------------------------------------------------------------------------------
// transformers' gradients, put into our order in device memory and written, must come out as transformers wrote them.
TEST(gradients_as_transformers_has_them) {
    const Ops *ops = ops_fenced();
    for (size_t g = 0; g < GOLDEN_MODELS; g++) {
        const GoldenModel *golden = &golden_models[g];
        GoldenModel reference = {golden->name, golden->text, DTYPE_FP32, 1};
        Model model = model_of(golden->text, ops->stored);
        char path[300];
        snprintf(path, sizeof(path), GOLDEN "%s/reference.safetensors", golden->name);
        for (size_t t = 0; t < 3; t++) {
            DType stored = memory_types[t];
            size_t bytes = model.elements * dtype_size(stored), written_bytes;
            const char *out = scratch_path("gradients.safetensors");
            void *device = ops->allocate(bytes);
            uint64_t header_bytes;
            test_case("%s, %s", golden->name, dtype_name(stored));
            void *host = case_memory(bytes);
            const char *file = read_whole(path, NULL);
            for (size_t i = 0; i < model.parameter_count; i++) {
                const Parameter *p = &model.parameters[i];
                FoundTensor tensor = golden_tensor(&reference, &file, "grad.", p);
                for (size_t j = 0; j < parameter_elements(p); j++)
                    element_write(host, stored, p->offset + j, found_parameter_value(&tensor, p, j));
            }
            ops->copy_in(device, host, bytes);
            allocation_guard = 1;
            gradients_write(out, NULL, &model, world_alone(), ops, device, stored);
            allocation_guard = 0;
            const char *written = read_whole(out, &written_bytes);
            memcpy(&header_bytes, written, 8);
            assert_int_equal(header_bytes % 8, 0);
            assert_int_equal(written_bytes, 8 + header_bytes + model.elements * 4);
            for (size_t i = 0; i < model.parameter_count; i++) {
                const Parameter *p = &model.parameters[i];
                FoundTensor expected = golden_tensor(&reference, &file, "grad.", p);
                FoundTensor found = golden_tensor(&reference, &written, "", p);
                assert_int_equal(found.type, DTYPE_FP32);
                assert_int_equal(found.rank, expected.rank);
                assert_memory_equal(found.shape, expected.shape, sizeof(found.shape));
                for (size_t j = 0; j < parameter_elements(p); j++) {
                    if (found_value(&found, j) != round_to(stored, found_value(&expected, j)))
                        test_fail("%s[%zu] is %.9g, expected %.9g", p->name, j, found_value(&found, j),
                                  found_value(&expected, j));
                }
            }
            ops->release(device, bytes);
        }
        model_free(&model);
    }
}

static void check_globs(const void *context) {
    Model model = model_of("gpt2,num_hidden_layers=2", DTYPE_FP32);
    gradients_check_globs((const char *)context, &model);
}

// Our own reader accepts what gradients_write writes: matrices of several slabs, transposed, included. A file of some
// gradients has these parameters, each with the bytes that the file of all has.
TEST(gradients_of_globs) {
    static const struct {
        const char *globs;
        size_t count; // of gpt2 with two layers, which has 28
    } cases[] = {
        {NULL, 28}, {"*", 28}, {"transformer.ln_f.*", 2}, {"*.h.1.*,*.h.0.ln_?.weight", 14}, {"*.wte.*,*wte*", 1}};
    const Ops *ops = ops_fenced();
    Model model = model_of("gpt2,n_embd=400,n_head=4,vocab_size=1700,n_positions=16,num_hidden_layers=2", ops->stored);
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

// ---- output is complete or absent -----------------------------------------------------------------------------------
static void convert_on_a_full_disk(const void *path) {
    struct rlimit limit = {100000, 100000}; // of the 165,600 + 4096 bytes the file has
    setrlimit(RLIMIT_FSIZE, &limit);
    convert_flat(GOLDEN "llama", (const char *)path);
}

// The reservation succeeds, a later write fails.
static void convert_on_a_disk_that_fills(const void *path) {
    WeightSource *source = weights_open(GOLDEN "llama");
    FlatWriter writer;
    struct rlimit limit = {100000, 100000};
    char block[4096] = {0};
    flat_begin(&writer, (const char *)path, &source->model, DTYPE_FP32);
    setrlimit(RLIMIT_FSIZE, &limit);
    for (size_t i = 0; i < 40; i++) flat_append(&writer, block, sizeof(block));
    output_commit(&writer.output);
}

static void convert_from_a_file_that_shrinks(const void *path) {
    const char *copy = copy_golden("llama");
    char file[PATH_MAX];
    WeightSource *source = weights_open(copy);
    path_join(file, copy, "model.safetensors");
    assert_int_equal(truncate(file, 100000), 0);
    weights_convert(source, (const char *)path, DTYPE_BF16);
}

TEST(failed_output_leaves_nothing) {
    const char *path = scratch_path("output.bin");
    expect_refused(convert_on_a_disk_that_fills, path, 1, "output.bin: writing 2400 bytes at byte 100000 failed");
    expect_nothing_at(path);
    expect_refused(convert_from_a_file_that_shrinks, path, 1, "model.safetensors: ends at byte 100000");
    expect_nothing_at(path);
}

TEST(failed_output_keeps_what_was_there) {
    const char *path = scratch_path("kept.bin");
    write_file(path, "as it was", 9);
    expect_refused(convert_on_a_full_disk, path, 1, "kept.bin: reserving 165.72 KiB failed: File too large");
    assert_string_equal(read_whole(path, NULL), "as it was");
    assert_int_equal(count_temporaries(path), 0);
    convert_flat(GOLDEN "llama", path); // and a good one replaces it
    expect_same_weights(GOLDEN "llama", path, DTYPE_FP32);
}

// ---- memory ---------------------------------------------------------------------------------------------------------
// 64 MiB of weights are read, converted and written within the staging buffers and a little more.
static void convert_large(const void *path) {
    Model model = model_of("llama,vocab_size=32768,hidden_size=1024,intermediate_size=16,num_hidden_layers=1,"
                           "num_attention_heads=1,num_key_value_heads=1,head_dim=2,tie_word_embeddings=true",
                           DTYPE_BF16);
    write_zeros(scratch_path("large.bin"), &model, DTYPE_BF16);
    const long before = memory_peak();
    WeightSource *source = weights_open(scratch_path("large.bin"));
    weights_convert(source, (const char *)path, DTYPE_FP32);
    weights_close(source);
    printf("%ld\n", memory_peak() - before);
}

TEST(memory_is_bounded) { expect_bounded_memory(convert_large, scratch_path("converted-large.bin"), 24); }

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
