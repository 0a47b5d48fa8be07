/*
Folders of matrices in 4 bits, as transformers and bitsandbytes save them (test/golden/make_quantised_folders.py):
reading one equals encoding the same model; wrong ones are refused, naming the fault. Folders in FP8 (make_fp8.py)
decode as transformers and the formula decode them.
*/
#include "test/base/damage.h"
#include "weight_files.h"
#include "llmc/files/storage_load.h"

#define NF4   "qwen3-nf4/"
#define FP4   "gpt2-fp4/"
#define MXFP4 "gpt_oss-mxfp4/"
#define FP8   "qwen3_moe-fp8/"
#define FORMS "qwen3-fp8/"

// Compares all 4-bit matrices of a folder with the encoded original.
static void expect_encoded(const char *folder, const char *original, QuantFormat format, size_t count) {
    WeightSource *read = weights_open(folder), *made = weights_open(original);
    size_t found = 0;
    source_quantise(made, format, 0);
    for (size_t i = 0; i < read->model.parameter_count; i++) {
        const size_t n = parameter_elements(&read->model.parameters[i]);
        if (!source_is_quantised(read, i)) continue;
        const size_t bytes = quant_parts(read->quant[i], n).bytes;
        test_case("%s", read->model.parameters[i].name);
        uint8_t *a = (uint8_t *)case_memory(bytes), *b = (uint8_t *)case_memory(bytes);
        assert_true(read->places[i].is_codes && !made->places[i].is_codes);
        const QuantFormat q = read->quant[i], m = made->quant[i]; // padding may differ
        assert_true(q.type == m.type && q.nested == m.nested && q.block == m.block && q.rounding == m.rounding);
        source_read_record(read, i, a), source_read_record(made, i, b);
        assert_memory_equal(a, b, bytes);
        found++;
    }
    assert_int_equal(found, count);
    weights_close(read), weights_close(made);
}

TEST(records_are_those_of_the_files) {
    const QuantFormat nf4 = {QUANT_NF4, 1, 64, DTYPE_BF16, {0}}, fp4 = {QUANT_FP4, 0, 64, DTYPE_FP32, {0}};
    expect_encoded(GOLDEN NF4, GOLDEN "qwen3-bf16", nf4, 11);
    expect_encoded(GOLDEN FP4, GOLDEN "gpt2", fp4, 8);
}

// Ranges of decoded values equal the whole matrix's, in memory order and in that of files: Conv1D's, and of experts.
static void expect_ranges(const char *folder) {
    WeightSource *source = weights_open(folder);
    for (size_t i = 0; i < source->model.parameter_count; i++) {
        const Parameter *p = &source->model.parameters[i];
        const size_t n = parameter_elements(p);
        if (!source_is_quantised(source, i)) continue;
        float *whole = (float *)case_memory(n * sizeof(float)), *part = (float *)case_memory(n * sizeof(float));
        uint8_t *record = (uint8_t *)case_memory(quant_parts(source->quant[i], n).bytes);
        source_read_record(source, i, record);
        quant_decode_range(whole, source->quant[i], record, n, 0, n);
        for (size_t begin = 0; begin < n; begin += 101) {
            const size_t count = min_size(101, n - begin);
            source_read_order(source, i, begin, count, DTYPE_FP32, 0, part);
            assert_memory_equal(part, whole + begin, count * sizeof(float));
            source_read_order(source, i, begin, count, DTYPE_FP32, 1, part);
            const size_t rows = p->rows / max_size(p->experts, 1), each = rows * p->cols;
            for (size_t k = begin, i; k < begin + count; k++) {
                i = k % each;
                assert_true(part[k - begin] == whole[k - i + i % rows * p->cols + i / rows]);
            }
        }
    }
    weights_close(source);
}

TEST(ranges_of_decoded_values) {
    expect_ranges(GOLDEN FP4);
    expect_ranges(GOLDEN MXFP4);
}

// Values of FP8 in any range, across experts, equal those of the folder that transformers (FORMS: the formula) decoded.
static void expect_decoded(const char *folder, size_t coded) {
    char path[300];
    snprintf(path, sizeof(path), GOLDEN "%s", folder);
    WeightSource *fp8 = weights_open(path);
    const char *copy = copy_golden(folder);
    run_command("cp --no-preserve=mode " GOLDEN "%sdecoded/" HF_SINGLE_FILE " '%s'", folder, copy);
    run_command("sed -i s/quantization_config/ignored/ '%s'/config.json%s", copy, "");
    WeightSource *bf16 = weights_open(copy);
    size_t found = 0;
    for (size_t i = 0; i < fp8->model.parameter_count; i++) {
        const size_t n = parameter_elements(&fp8->model.parameters[i]);
        test_case("%s", fp8->model.parameters[i].name);
        uint16_t *a = (uint16_t *)case_memory(n * 2), *b = (uint16_t *)case_memory(n * 2);
        weights_read(bf16, i, 0, n, DTYPE_BF16, b);
        for (size_t begin = 0; begin < n; begin += 333)
            weights_read(fp8, i, begin, min_size(333, n - begin), DTYPE_BF16, a + begin);
        assert_memory_equal(a, b, n * 2);
        found += fp8->places[i].is_codes != 0;
    }
    assert_int_equal(found, coded);
    weights_close(fp8), weights_close(bf16);
}

TEST(fp8_is_decoded) {
    expect_decoded(FP8, 11);
    expect_decoded(FORMS, 13);
}

// The first matrix of either folder; byte 0 of the data after the header
#define DOWN "model.layers.0.mlp.down_proj.weight"
#define RENAMED(part)                                                                                                  \
    CHANGED_TEXT(NF4 HF_SINGLE_FILE, DOWN part "\"", DOWN "x" part "\"", "tensor " DOWN part " is missing")
#define STATE(was, is, words)                                                                                          \
    CHANGED_TEXT(NF4 HF_SINGLE_FILE, was, is, "tensor " DOWN ".quant_state.bitsandbytes__nf4 " words)
#define NF4_DATA(byte)            (8 + 8672 + (byte))
#define FP4_DATA(byte)            (8 + 5112 + (byte))
#define MXFP4_DATA(byte)          (8 + 4152 + (byte))
#define FP8_DATA(byte)            (8 + 6888 + (byte))
#define UP                        "model.layers.0.mlp.experts.1.up_proj.weight"
#define EXPERTS                   "model.layers.0.mlp.experts.down_proj"
#define QUANTISER(was, is, words) CHANGED_TEXT(NF4 "config.json", was, is, words)

TEST(wrong_folders) {
    static const Damage rows[] = {
        CHANGED_TEXT("qwen3/" HF_SINGLE_FILE, DOWN "\"", "model.layers.0.mlp.down_proj.qweight\"",
                     "tensor " DOWN
                     " is missing; there are model.layers.0.mlp.down_proj.qweight; take the original model, "
                     "not wrapped or quantised; --base nf4"),
        CHANGED_TEXT("qwen3/" HF_SINGLE_FILE, DOWN "\":{\"dtype\":\"F32\"", DOWN "\":{\"dtype\":\"I32\"",
                     "if it is quantised, take the original"),
        RENAMED(".absmax"),
        RENAMED(".nested_absmax"),
        RENAMED(".quant_map"),
        RENAMED(".nested_quant_map"),
        CHANGED_TEXT(NF4 HF_SINGLE_FILE, DOWN ".quant_state.bitsandbytes__nf4", DOWN ".quant_state.bitsandbytes__nf5",
                     "dtype U8, which is not supported|has shape [1120, 1]"),
        CHANGED_TEXT(NF4 HF_SINGLE_FILE, DOWN ".quant_map\":{\"dtype\":\"F32\",\"shape\":[16]",
                     DOWN ".quant_map\":{\"dtype\":\"F32\",\"shape\":[4,4]", "is F32 [4, 4], not F32 [16]"),
        CHANGED_TEXT(NF4 HF_SINGLE_FILE, DOWN ".quant_map\":{\"dtype\":\"F32\"", DOWN ".quant_map\":{\"dtype\":\"I32\"",
                     "is I32 [16], not F32 [16]"),
        STATE("\"blocksize\": 64", "\"blocksize\": 48", "has blocksize 48"),
        STATE("\"blocksize\": 64", "\"blocksize\": 16", "has blocksize 16"),
        STATE("\"blocksize\": 64", "\"blocksize\": -4", "has blocksize -4"),
        STATE("\"blocksize\": 64", "\"clocksize\": 64", "has no number blocksize"),
        CHANGED_TEXT(NF4 HF_SINGLE_FILE, "\"blocksize\": 64", "\"blocksize\": 32",
                     "tensor " DOWN ".absmax is U8 [35], not U8 [70]"),
        STATE("\"quant_type\": \"nf4\"", "\"quant_type\": \"fp4\"", "has another quant_type than its name"),
        STATE("\"shape\": [40, 56]", "\"shape\": [56, 40]", "has another shape than config.json's [40, 56]"),
        STATE("\"shape\": [40, 56]", "\"shape\": [40,5,6]", "has another shape than config.json's [40, 56]"),
        STATE("\"nested_blocksize\": 256", "\"nested_blocksize\": 128", "has a nested_blocksize other than 256"),
        STATE("\"nested_dtype\": \"float32\"", "\"nested_dtype\": \"float16\"", "has a nested_dtype"),
        STATE("\"nested_offset\": 0", "\"nested_offzet\": 0", "has no number nested_offset"),
        STATE("\"dtype\": \"bfloat16\"", "\"dtype\": \"cfloat16\"", "has a dtype other than"),
        STATE("{\"quant_type\"", "[\"quant_type\"", "is not a JSON object"),
        OTHER_NUMBER(NF4 HF_SINGLE_FILE, NF4_DATA(0), 4, 0x7f800000, "tensor " DOWN ".nested_absmax has inf at [0]"),
        OTHER_NUMBER(NF4 HF_SINGLE_FILE, NF4_DATA(0), 4, 0x7fc00000, "tensor " DOWN ".nested_absmax has nan at [0]"),
        OTHER_NUMBER(NF4 HF_SINGLE_FILE, NF4_DATA(0), 4, 0xbf800000, "tensor " DOWN ".nested_absmax has -1 at [0]"),
        OTHER_NUMBER(NF4 HF_SINGLE_FILE, NF4_DATA(4), 4, 0, "tensor " DOWN ".nested_quant_map has 0 at [0]"),
        OTHER_NUMBER(NF4 HF_SINGLE_FILE, NF4_DATA(1028 + 60), 4, 0x40000000, "tensor " DOWN ".quant_map has 2 at [15]"),
        OTHER_NUMBER(FP4 HF_SINGLE_FILE, FP4_DATA(292), 4, 0xff800000, "c_attn.weight.absmax has -inf at [1]"),
        OTHER_NUMBER(FP4 HF_SINGLE_FILE, FP4_DATA(400), 4, 0, "c_attn.weight.quant_map has 0 at [1]"),
        QUANTISER("\"quant_method\": \"bitsandbytes\"", "\"quant_method\": \"gptq\"", "quantization_config (gptq)"),
        QUANTISER("\"quant_method\": \"bitsandbytes\"", "\"quant_method\": \"awq\"", "quantization_config (awq)"),
        QUANTISER("\"quant_method\": \"bitsandbytes\"", "\"quant_method\": \"mxfp4\"", "quantization_config (mxfp4)"),
        QUANTISER("\"quant_method\": \"bitsandbytes\"", "\"quant_method\": \"compressed-tensors\"",
                  "quantization_config (compressed-tensors, no format): only FP8 in e4m3"),
        QUANTISER("\"load_in_4bit\": true,\n    \"load_in_8bit\": false",
                  "\"load_in_4bit\": false, \"load_in_8bit\": true", "quantization_config (bitsandbytes in 8 bits)"),
        CHANGED_TEXT(MXFP4 HF_SINGLE_FILE, EXPERTS "_scales", EXPERTS "_skales",
                     "tensor " EXPERTS "_scales is missing; download the folder again"),
        CHANGED_TEXT(MXFP4 HF_SINGLE_FILE, EXPERTS "_blocks\":{\"dtype\":\"U8\"", EXPERTS "_blocks\":{\"dtype\":\"I8\"",
                     "tensor " EXPERTS "_blocks is I8 [3, 32, 2, 16], but config.json asks for U8 [3, 32, 2, 16]"),
        CHANGED_TEXT(MXFP4 HF_SINGLE_FILE, EXPERTS "_scales\":{\"dtype\":\"U8\",\"shape\":[3,32,2]",
                     EXPERTS "_scales\":{\"dtype\":\"U8\",\"shape\":[3,2,32]",
                     "_scales is U8 [3, 2, 32], but config.json"),
        OTHER_NUMBER(MXFP4 HF_SINGLE_FILE, MXFP4_DATA(26078), 1, 255, "tensor " EXPERTS "_scales has 255 at [2]"),
        OTHER_NUMBER(MXFP4 HF_SINGLE_FILE, MXFP4_DATA(26078), 1, 253, "tensor " EXPERTS "_scales has 253 at [2]"),
        OTHER_NUMBER(MXFP4 HF_SINGLE_FILE, MXFP4_DATA(26078), 1, 252, NULL),
        CHANGED_TEXT(FP8 HF_SINGLE_FILE, UP "_scale_inv", UP "_scale_unv",
                     "tensor " UP " is in F8_E4M3, but " UP "_scale_inv, its scales, is missing"),
        CHANGED_TEXT(FP8 HF_SINGLE_FILE, UP "_scale_inv\":{\"dtype\":\"F32\",\"shape\":[1,2]",
                     UP "_scale_inv\":{\"dtype\":\"F32\",\"shape\":[2,1]",
                     "tensor " UP "_scale_inv has shape [2, 1], but blocks of 16 x 16 have [1, 2]; take config.json"),
        CHANGED_TEXT(FP8 HF_SINGLE_FILE, UP "_scale_inv\":{\"dtype\":\"F32\"", UP "_scale_inv\":{\"dtype\":\"I32\"",
                     "tensor " UP "_scale_inv has dtype I32; scales in F32, BF16, U8 and F8_E8M0"),
        CHANGED_TEXT(FP8 HF_SINGLE_FILE, UP "\":{\"dtype\":\"F8_E4M3\"", UP "\":{\"dtype\":\"F8_E5M2\"",
                     "tensor " UP " has dtype F8_E5M2"),
        CHANGED_TEXT(FP8 HF_SINGLE_FILE, UP "\":{\"dtype\":\"F8_E4M3\",\"shape\":[16,32]",
                     UP "\":{\"dtype\":\"F8_E4M3\",\"shape\":[32,16]",
                     "tensor " UP " has shape [32, 16], but config.json"),
        OTHER_NUMBER(FP8 HF_SINGLE_FILE, FP8_DATA(40), 4, 0, "tensor " UP "_scale_inv has 0 at [0]; scales are finite"),
        OTHER_NUMBER(FP8 HF_SINGLE_FILE, FP8_DATA(44), 4, 0x7fc00000, "tensor " UP "_scale_inv has nan at [1]"),
        OTHER_NUMBER(FP8 HF_SINGLE_FILE, FP8_DATA(44), 4, 0xbf800000, "tensor " UP "_scale_inv has -1 at [1]"),
        OTHER_NUMBER(FP8 HF_SINGLE_FILE, FP8_DATA(16936 + 77), 1, 0x7f,
                     "tensor " UP " has the code 0x7f, which is NaN, at [77]; download the folder again"),
        OTHER_NUMBER(FP8 HF_SINGLE_FILE, FP8_DATA(17447), 1, 0xff, "has the code 0xff, which is NaN, at [511]"),
        OTHER_NUMBER(FP8 HF_SINGLE_FILE, FP8_DATA(17447), 1, 0xfe, NULL),
        OTHER_NUMBER(FORMS HF_SINGLE_FILE, 8 + 4432 + 39285, 1, 255, "o_proj.weight_scale has nan at [1]"),
        CHANGED_TEXT(FP8 "config.json", "\"weight_block_size\": [\n      16,", "\"weight_block_size\": [\n      32,",
                     "_scale_inv has shape [2, 2], but blocks of 32 x 16 have [1, 2]"),
        CHANGED_TEXT(FP8 "config.json", "\"weight_block_size\": [\n      16,", "\"weight_block_size\": [\n      0,",
                     "a size of blocks is not a whole number above 0"),
        CHANGED_TEXT(FP8 "config.json", "\"weight_block_size\": [\n      16,",
                     "\"weight_block_size\": [\n      16, 16,", "a size of blocks is not a list such as [128, 128]"),
        CHANGED_TEXT(FP8 "config.json", "\"fmt\": \"e4m3\"", "\"fmt\": \"e5m2\"",
                     "quantization_config (fp8, e5m2): only FP8 in e4m3 is supported"),
        CHANGED_TEXT(FP8 "config.json", "\"fmt\": \"e4m3\"", "\"expert_dtype\": \"fp4\"",
                     "quantization_config (fp8, fp4)"),
        CHANGED_TEXT(FP8 "config.json", "\"quant_method\": \"fp8\"",
                     "\"quant_method\": \"modelopt\", \"quant_algo\": \"NVFP4\"",
                     "quantization_config (modelopt, NVFP4)"),
        CHANGED_TEXT(FORMS "config.json", "\"float-quantized\"", "\"mxfp8-quantized\"",
                     "quantization_config (compressed-tensors, mxfp8-quantized): only FP8"),
        CHANGED_TEXT(FORMS "config.json", "\"num_bits\": 8", "\"num_bits\": 4", "only FP8 in e4m3 is supported"),
        CHANGED_TEXT(FORMS "config.json", "\"type\": \"float\"", "\"type\": \"int\"", "only FP8 in e4m3 is supported"),
        QUANTISER("\"bnb_4bit_quant_type\": \"nf4\"", "\"bnb_4bit_quant_type\": \"af4\"", "bnb_4bit_quant_type is af4"),
    };
    const DamageSuite suite = {copy_goldens("qwen3-nf4 gpt2-fp4 qwen3 gpt_oss-mxfp4 qwen3_moe-fp8 qwen3-fp8"),
                               open_and_read, NULL, mend_safetensors, 0};
    expect_damage_found(&suite, rows, COUNT_OF(rows));
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
