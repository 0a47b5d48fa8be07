/*
Wrong files of weights: each must be refused with exit code 1 and one line that names what is wrong, before anything is
computed with it. Then golden files with random damage: whatever comes of it, never a crash, a hang or a huge allocation.
*/
#include <setjmp.h>
#include <stdlib.h>

// The last test runs thousands of refusals in one process: there, `exit` returns to it.
static jmp_buf *exit_return;

__attribute__((noreturn)) static void returning_exit(int code) {
    if (exit_return) longjmp(*exit_return, 1 + code);
    exit(code);
}
#define exit returning_exit

#include "weight_files.h"
#include <sys/mman.h>
#include <sys/resource.h>

// ---- damage that is a change of text -----------------------------------------------------------------------------------------
typedef struct {
    const char *golden, *file;
    const char *find, *replace;
    const char *words; // in the refusal
} BadText;

#define CONFIG "config.json"
#define INDEX  HF_INDEX_FILE
#define MODEL  HF_SINGLE_FILE

static const BadText bad_texts[] = {
    // what kind of model
    {"llama", CONFIG, "\"LlamaForCausalLM\"", "\"MixtralForCausalLM\"",
     "architecture MixtralForCausalLM is not supported"},
    {"llama", CONFIG, "\"LlamaForCausalLM\"", "\"LlamaForCausalLM\", \"B\"", "architectures names more than one"},
    {"llama", CONFIG, "\"LlamaForCausalLM\"", "7", "architecture 7 is not supported"},
    {"llama", CONFIG, "\"LlamaForCausalLM\"", "\"\\n\"", "architecture ? is not supported"},
    {"llama", CONFIG, "\"model_type\": \"llama\"", "\"model_type\": \"gemma3\"", "model_type gemma3 is not supported"},
    {"llama", CONFIG, "\"model_type\": \"llama\"", "\"model_type\": \"qwen2\"",
     "architectures says LlamaForCausalLM, but model_type says qwen2"},
    {"llama", CONFIG, "\"architectures\": [\n    \"LlamaForCausalLM\"\n  ],", "\"architectures\": [],\"x\":\"",
     "is not valid JSON"},
    // what it computes
    {"llama", CONFIG, "\"silu\"", "\"gelu\"", "hidden_act is gelu, which is not supported; supported is silu"},
    {"gpt2", CONFIG, "\"gelu_new\"", "\"relu\"", "activation_function is relu"},
    {"gpt2", CONFIG, "\"scale_attn_weights\": true", "\"scale_attn_weights\": false", "scale_attn_weights is false"},
    {"gpt2", CONFIG, "\"scale_attn_by_inverse_layer_idx\": false", "\"scale_attn_by_inverse_layer_idx\": true",
     "scale_attn_by_inverse_layer_idx is true"},
    {"gpt2", CONFIG, "\"reorder_and_upcast_attn\": false", "\"reorder_and_upcast_attn\": true",
     "reorder_and_upcast_attn is true"},
    {"gpt2", CONFIG, "\"add_cross_attention\": false", "\"add_cross_attention\": true", "add_cross_attention is true"},
    {"llama", CONFIG, "{", "{\"quantization_config\":{\"quant_method\":\"gptq\"},", "quantization_config (gptq)"},
    {"llama", CONFIG, "{", "{\"partial_rotary_factor\":0.5,", "partial_rotary_factor is 0.5"},
    {"llama", CONFIG, "\"dtype\": \"float32\"", "\"dtype\": \"float8_e4m3fn\"", "dtype is float8_e4m3fn"},
    {"llama-sharded", CONFIG, "\"torch_dtype\": \"float32\"", "\"torch_dtype\": \"int8\"", "torch_dtype is int8"},
    // rotary positions
    {"llama", CONFIG, "\"rope_type\": \"default\"", "\"rope_type\": \"yarn\"", "rope_type yarn needs factor"},
    {"llama", CONFIG, "\"rope_type\": \"default\"", "\"rope_type\": \"dynamic\",\"factor\":2",
     "rope_parameters of type dynamic is not supported; default, linear, llama3 and yarn are"},
    {"llama3", CONFIG, "\"low_freq_factor\": 1.0", "\"low_freq_factor\": 4.0",
     "low_freq_factor 4 is not below high_freq_factor 4"},
    {"llama3", CONFIG, "\"high_freq_factor\": 4.0,", "", "rope_type llama3 needs high_freq_factor"},
    {"qwen3-yarn", CONFIG, "\"beta_fast\": 16.0", "\"beta_fast\": \"16\"", "beta_fast is the text"},
    {"qwen3-yarn", CONFIG, "\"beta_fast\": 16.0", "\"attention_factor\": 0", "attention_factor is 0"},
    {"llama", CONFIG, "\"rope_type\": \"default\"", "\"factor\": 8", "rope_parameters has a factor but no type"},
    {"llama", CONFIG, "\"rope_type\": \"default\"", "\"full_attention\": {}", "rope_parameters.full_attention"},
    {"llama", CONFIG, "\"rope_type\": \"default\"", "\"partial_rotary_factor\": 0.25",
     "rope_parameters.partial_rotary_factor is 0.25"},
    {"llama", CONFIG, "{", "{\"rope_theta\":500000,", "rope_theta is given twice"},
    {"llama", CONFIG, "\"rope_theta\": 10000.0", "\"rope_theta\": -1", "rope_theta=-1 is out of range"},
    {"llama-sharded", CONFIG, "\"rope_scaling\": null",
     "\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8.0}", "rope_type llama3 needs low_freq_factor"},
    {"llama-sharded", CONFIG, "\"rope_scaling\": null", "\"rope_scaling\": {\"type\": \"longrope\", \"factor\": 2.0}",
     "rope_scaling of type longrope is not supported"},
    {"llama-sharded", CONFIG, "\"rope_scaling\": null", "\"rope_scaling\": \"linear\"",
     "rope_scaling is not an object"},
    // windows
    {"qwen2", CONFIG, "\"full_attention\",\n    \"full_attention\"\n",
     "\"full_attention\",\n    \"sliding_attention\"\n",
     "layer_types has sliding_attention, but there is no sliding_window (or use_sliding_window is false)"},
    {"qwen2", CONFIG, "\"full_attention\",\n    \"full_attention\"\n",
     "\"full_attention\",\n    \"linear_attention\"\n", "layer_types: layer 2 has linear_attention"},
    {"gemma3", CONFIG, "\"sliding_window\": 8", "\"sliding_window\": null", "there is no sliding_window"},
    {"gemma3-linear", CONFIG, "\"sliding_window\": 5", "\"sliding_window\": null",
     "sliding_window is null, but layers have sliding attention"},
    {"mistral", CONFIG, "{", "{\"layer_types\":[\"full_attention\",\"sliding_attention\",\"full_attention\"],",
     "gives every layer the sliding_window"},
    // what else Gemma may be
    {"gemma3", CONFIG, "\"attn_logit_softcapping\": null", "\"attn_logit_softcapping\": 50.0",
     "attn_logit_softcapping is 50, which is not supported; supported is null"},
    {"gemma3", CONFIG, "\"use_bidirectional_attention\": false", "\"use_bidirectional_attention\": true",
     "use_bidirectional_attention is true"},
    {"gemma3", CONFIG, "\"rope_theta\": 10000.0,\n      \"rope_type\": \"default\"",
     "\"rope_theta\": 10000.0,\n      \"rope_type\": \"linear\"",
     "rope_parameters.sliding_attention of type linear is not supported"},
    {"gemma3", CONFIG, "\"Gemma3ForCausalLM\"", "\"Gemma3ForConditionalGeneration\"",
     "architecture Gemma3ForConditionalGeneration is not supported"},
    {"gemma3", CONFIG, "{\n", "{\"text_config\":{},\"model_type\":\"gemma3\",\"was\":{},\n", "given twice"},
    {"gemma3-linear", CONFIG, "\"model_type\": \"gemma3_text\"", "\"model_type\": \"gemma3\",\"text_config\":{}",
     "is a model with images or sound beside its text"},
    {"qwen2", CONFIG, "\"full_attention\",\n", "", "layer_types names 2 layers, num_hidden_layers is 3"},
    {"qwen2", CONFIG, "\"layer_types\"",
     "\"max_window_layers\":1,\"sliding_window\":64,\"use_sliding_window\":true,\"was\"",
     "the key \"max_window_layers\" is given twice"},
    // numbers
    {"llama", CONFIG, "\"hidden_size\": 40,", "", "hidden_size (or n_embd) is missing"},
    {"gpt2", CONFIG, "\"n_head\": 3,", "\"n_head\": null,", "num_attention_heads (or n_head) is missing"},
    {"gpt2", CONFIG, "\"n_positions\": 64,", "", "max_position_embeddings (or n_positions) is missing"},
    {"llama", CONFIG, "\"intermediate_size\": 88,", "", "intermediate_size (or n_inner) is missing"},
    {"llama", CONFIG, "\"vocab_size\": 131", "\"x\": 131", "vocab_size is missing"},
    {"llama", CONFIG, "\"hidden_size\": 40", "\"hidden_size\": -40", "hidden_size=-40 is not a whole number"},
    {"llama", CONFIG, "\"hidden_size\": 40", "\"hidden_size\": 40.5", "hidden_size=40.5 is not a whole number"},
    {"llama", CONFIG, "\"hidden_size\": 40", "\"hidden_size\": \"40\"",
     "hidden_size is the text \"40\", a number was expected"},
    {"llama", CONFIG, "\"hidden_size\": 40", "\"hidden_size\": 1e300",
     "hidden_size=1.0000000000000001e+300 is not a whole"},
    {"llama", CONFIG, "\"hidden_size\": 40", "\"hidden_size\": 4000000000", "hidden_size=4000000000 is out of range"},
    {"llama", CONFIG, "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 0", "num_hidden_layers=0 is out of range"},
    {"llama", CONFIG, "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3",
     "model.layers.2.input_layernorm.weight is missing"},
    {"llama", CONFIG, "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1",
     "model.layers.1.input_layernorm.weight is not one of LlamaForCausalLM with this config.json (9 such tensors)"},
    {"llama", CONFIG, "\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3",
     "num_attention_heads 4 is not a multiple of num_key_value_heads 3"},
    {"qwen2", CONFIG, "\"num_key_value_heads\": 2", "\"num_key_value_heads\": null", // one per head
     "k_proj.weight has shape [16, 32], but config.json asks for [32, 32]"},
    {"llama", CONFIG, "\"head_dim\": 10", "\"head_dim\": 9", "head_dim 9 is odd"},
    {"llama", CONFIG, "\"head_dim\": 10", "\"head_dim\": 12",
     "q_proj.weight has shape [40, 40], but config.json asks for [48, 40]"},
    {"llama", CONFIG, "\"vocab_size\": 131", "\"vocab_size\": 132",
     "model.embed_tokens.weight has shape [131, 40], but config.json asks for [132, 40]"},
    {"llama", CONFIG, "\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": -1", "rms_norm_eps=-1 is out of range"},
    {"llama", CONFIG, "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": 0",
     "tie_word_embeddings is 0, true or false"},
    {"llama", CONFIG, "\"attention_bias\": false", "\"attention_bias\": true", "q_proj.bias is missing"},
    {"llama-tied", CONFIG, "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false",
     "lm_head.weight is missing"},
    {"gpt2", CONFIG, "\"n_embd\": 24", "\"hidden_size\": 32, \"n_embd\": 24",
     "hidden_size and n_embd are the same thing"},
    {"gpt2", CONFIG, "\"n_head\": 3", "\"n_head\": 5", "hidden_size 24 is not a multiple of num_attention_heads 5"},
    {"gpt2", CONFIG, "\"n_inner\": null", "\"n_inner\": 64",
     "mlp.c_fc.weight has shape [24, 96], but config.json asks for [24, 64]"},
    // the text of config.json
    {"llama", CONFIG, "}\n", "", "config.json: is not valid JSON, the error is near byte"},
    {"llama", CONFIG, "{", "[{", "config.json: is not valid JSON"},
    {"llama", CONFIG, "\"silu\"", "\"si\xfflu\"", "is not UTF-8 text"},
    {"llama", CONFIG, "\"silu\"", "\"si\xed\xa0\x80lu\"", "is not UTF-8 text"},
    {"llama", CONFIG, "\"silu\"", "\"si\001lu\"", "is not UTF-8 text"},
    {"llama", CONFIG, "\"mlp_bias\": false", "\"hidden_size\": 40", "the key \"hidden_size\" is given twice"},
    {"llama", CONFIG, "\"mlp_bias\": false", "\"a\\u001bb\": 1", "a key holds control characters"},
    // the header of a safetensors file
    {"llama", MODEL, "model.norm.weight", "model.norm.w", "tensor model.norm.weight is missing"},
    {"llama", MODEL, "\"__metadata__\":{\"format\":\"pt\"}",
     "\"extra\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}",
     "tensor extra is not one of LlamaForCausalLM with this config.json (1 such tensor)"},
    {"llama", MODEL, "\"dtype\":\"F32\",\"shape\":[131,40]", "\"dtype\":\"I32\",\"shape\":[131,40]",
     "lm_head.weight has dtype I32, which is not supported; supported are F32, F16, BF16, F64"},
    {"llama", MODEL, "\"dtype\":\"F32\",\"shape\":[131,40]", "\"dtype\":\"F8_E4M3\",\"shape\":[131,160]",
     "lm_head.weight has shape [131, 160]"},
    {"llama", MODEL, "\"dtype\":\"F32\",\"shape\":[131,40]", "\"dtype\":\"F99\",\"shape\":[131,40]",
     "lm_head.weight has dtype F99"},
    {"llama", MODEL, "\"dtype\":\"F32\",\"shape\":[131,40]", "\"dtype\":32,\"shape\":[131,40]",
     "lm_head.weight has no dtype"},
    {"llama", MODEL, "\"shape\":[131,40]", "\"shape\":[40,131]",
     "lm_head.weight has shape [40, 131], but config.json asks for [131, 40]"},
    {"llama", MODEL, "\"shape\":[131,40]", "\"shape\":[5240]", "lm_head.weight has shape [5240]"},
    {"llama", MODEL, "\"shape\":[131,40]", "\"shape\":[131,41]",
     "lm_head.weight: data_offsets hold 20960 bytes, but shape [131, 41] of F32 is another size"},
    {"llama", MODEL, "\"shape\":[131,40]", "\"shape\":[131,-40]",
     "lm_head.weight: its shape has something that is not a whole"},
    {"llama", MODEL, "\"shape\":[131,40]", "\"shape\":[131,4e1,1.5]", "lm_head.weight: its shape has something"},
    {"llama", MODEL, "\"shape\":[131,40]", "\"shape\":[4611686018427387904,4]",
     "lm_head.weight: its shape has something"},
    {"llama", MODEL, "\"shape\":[131,40]", "\"shape\":[4503599627370496,4503599627370496]", "is another size"},
    {"llama", MODEL, "\"shape\":[131,40]", "\"shape\":[8,17031093,33847548851]", // 20960 bytes, modulo 2^64
     "is another size"},
    {"llama", MODEL, "\"shape\":[40],\"data_offsets\":[165440,165600]",
     "\"shape\":[40,1],\"data_offsets\":[165440,165600]",
     "model.norm.weight has shape [40, 1], but config.json asks for [40]"},
    {"llama", MODEL, "\"shape\":[131,40]", "\"shape\":[1,1,1,1,1,1,1,131,40]",
     "lm_head.weight has more than 8 dimensions"},
    {"llama", MODEL, "\"shape\":[131,40]", "\"shape\":{}", "lm_head.weight has no shape"},
    {"llama", MODEL, "\"data_offsets\":[0,20960]", "\"data_offsets\":[0,20960,0]", "data_offsets are not two numbers"},
    {"llama", MODEL, "\"data_offsets\":[0,20960]", "\"data_offsets\":[20960,0]", "[20960, 0] end before they begin"},
    {"llama", MODEL, "\"data_offsets\":[0,20960]", "\"data_offsets\":[-1,20959]",
     "data_offsets has something that is not a whole"},
    {"llama", MODEL, "\"data_offsets\":[0,20960]", "\"data_offsets\":[\"0\",20960]", "data_offsets has something"},
    {"llama", MODEL, "\"data_offsets\":[0,20960]", "\"data_offsets\":[4,20964]",
     "bytes 0 to 4 of the data, before tensor lm_head.weight, belong to no tensor"},
    {"llama", MODEL, "\"data_offsets\":[20960,41920]", "\"data_offsets\":[20959,41919]",
     "model.embed_tokens.weight overlaps tensor lm_head.weight"},
    {"llama", MODEL, "\"data_offsets\":[20960,41920]", "\"data_offsets\":[0,20960]", "overlaps tensor"},
    {"llama", MODEL, "\"data_offsets\":[165440,165600]", "\"data_offsets\":[165600,165760]",
     "model.norm.weight reaches to byte 165760 of the data, of which there are 165600"},
    {"llama", MODEL, "\"data_offsets\":[0,20960]", "\"data_offsets\":[165600,186560]",
     "bytes 0 to 20960 of the data, before tensor model.embed_tokens.weight, belong to no tensor"},
    {"llama", MODEL, "{\"dtype\":\"F32\",\"shape\":[131,40],\"data_offsets\":[0,20960]}", "[1,2]",
     "the entry of tensor lm_head.weight is not an object"},
    {"llama", MODEL, "\"lm_head.weight\"", "\"model.norm.weight\"", "the key \"model.norm.weight\" is given twice"},
    {"llama", MODEL, "{\"__metadata__\"", " \"__metadata__\"", "model.safetensors: is not valid JSON"},
    {"llama", MODEL, "lm_head.weight", "lm_head.\xc0\x80", "is not UTF-8 text"},
    {"llama", MODEL, "\"shape\":[131,40]", "\"shape\":[131,40],\"shape\":[131,40]", "the key \"shape\" is given twice"},
    {"llama", MODEL, "\"shape\":[131,40]", "\"shape\":[131,40],\"dtype\":\"I32\"", "the key \"dtype\" is given twice"},
    {"llama", MODEL, "\"shape\":[131,40]", "\"shape\":[131,40],\"strides\":[1,131]",
     "lm_head.weight: its entry has the key \"strides\", which the format does not know"},
    {"llama", MODEL, "\"shape\":[131,40]", "\"shape\":[]", "but shape [] of F32 is another size"},
    {"llama", MODEL, "\"shape\":[131,40]", "\"shape\":[0,131,40]", "but shape [0, 131, 40] of F32 is another size"},
    {"llama", MODEL, "{\"__metadata__\":{\"format\":\"pt\"}",
     "{\"scalar\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[165600,165604]}",
     "scalar reaches to byte 165604 of the data, of which there are 165600"},
    {"llama", MODEL, "{\"__metadata__\":{\"format\":\"pt\"}",
     "{\"empty\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[20964,20964]}", "overlaps tensor"},
    {"llama", MODEL, "{\"__metadata__\":{\"format\":\"pt\"}",
     "{\"empty\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[165604,165604]}", "empty reaches to byte 165604"},
    {"llama", MODEL, "{\"__metadata__\":{\"format\":\"pt\"}",
     "{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,0]}", "tensor a is not one of LlamaForCausalLM"},
    {"llama", MODEL, "\"data_offsets\":[0,20960]", "\"data_offsets\":[0,18446744073709551615]",
     "data_offsets has something"},
    {"llama", MODEL, "\"data_offsets\":[0,20960]", "\"data_offsets\":[0,9007199254740992]",
     "data_offsets hold 9007199254740992"},
    {"llama", MODEL, "\"data_offsets\":[0,20960]", "\"data_offsets\":[0,1e999]", "data_offsets has something"},
    {"llama", MODEL, "\"data_offsets\":[0,20960]", "\"data_offsets\":[0,NaN]", "is not valid JSON"},
    {"llama", MODEL, "\"data_offsets\":[0,20960]", "\"data_offsets\":[[0],{\"a\":20960}]",
     "data_offsets has something"},
    {"llama", MODEL, "{\"format\":\"pt\"}", "[\"pt\"]", "its __metadata__ is not an object"},
    {"llama", MODEL, "{\"format\":\"pt\"}", "{\"format\":[\"pt\"]}",
     "__metadata__ has something that is not text: format"},
    {"llama", MODEL, "{\"format\":\"pt\"}", "{\"a\":\"1\",\"a\":\"1\"}", "the key \"a\" is given twice"},
    // escapes, which would end a name early
    {"llama", MODEL, "\"lm_head.weight\"", "\"lm_head.weight\\u0000x\"", "the escape at byte 47 is no character"},
    {"llama", MODEL, "\"lm_head.weight\"", "\"lm_head.weight\\uzzzz\"", "the escape at byte 47 is no character"},
    {"llama", MODEL, "\"lm_head.weight\"", "\"lm_head.weight\\ud800\"", "is not valid JSON"},
    {"llama", CONFIG, "\"silu\"", "\"silu\\u0000\"", "the escape at byte "},
    {"llama", CONFIG, "\"rope_type\": \"default\"", "\"rope_type\": \"default\", \"rope_type\": \"yarn\"",
     "the key \"rope_type\" is given twice"},
    // shards
    {"llama-sharded", INDEX, "\"weight_map\"", "\"weights\"", "has no weight_map"},
    {"llama-sharded", INDEX, "\"lm_head.weight\": \"model-00004", "\"lm_head.weight\": \"../model-00004",
     "weight_map puts tensor lm_head.weight into \"../model-00004-of-00004.safetensors\", which is not a file of this "
     "directory"},
    {"llama-sharded", INDEX, "\"lm_head.weight\": \"model-00004-of-00004.safetensors\"",
     "\"lm_head.weight\": \"/etc/passwd\"", "weight_map puts tensor lm_head.weight into \"/etc/passwd\""},
    {"llama-sharded", INDEX, "\"lm_head.weight\": \"model-00004-of-00004.safetensors\"", "\"lm_head.weight\": 4",
     "weight_map names no file for tensor lm_head.weight"},
    {"llama-sharded", INDEX, "\"lm_head.weight\": \"model-00004", "\"lm_head.weight\": \"model-00005",
     "model-00005-of-00004.safetensors: No such file or directory; model.safetensors.index.json lists this file: is "
     "the"},
    {"llama-sharded", INDEX, "\"lm_head.weight\": \"model-00004", "\"lm_head.weight\": \"model-00001",
     "tensor lm_head.weight should be in model-00001-of-00004.safetensors, but is not there"},
    {"llama-sharded", INDEX, "\"lm_head.weight\": \"model-00004-of-00004.safetensors\",", "",
     "does not list tensor lm_head.weight of"},
    {"llama-sharded", INDEX,
     "\"lm_head.weight\":", "\"other.weight\":", "tensor other.weight should be in model-00004"},
    {"llama-sharded", INDEX,
     "\"lm_head.weight\":", "\"model.norm.weight\":", "the key \"model.norm.weight\" is given twice"},
    {"llama-sharded", "model-00004-of-00004.safetensors", "\"lm_head.weight\"", "\"model.embed_tokens.weight\"",
     "tensor model.embed_tokens.weight is also in"},
};

TEST(wrong_texts) {
    size_t i;
    for (i = 0; i < sizeof(bad_texts) / sizeof(bad_texts[0]); i++) {
        const BadText *bad = &bad_texts[i];
        const char *copy = copy_golden(bad->golden);
        char path[PATH_MAX];
        test_case("%s, %s: \"%.60s\" for \"%.60s\"", bad->golden, bad->file, bad->replace, bad->find);
        path_join(path, copy, bad->file);
        edit_file(path, bad->find, bad->replace);
        expect_bad(copy, bad->words);
    }
}

// ---- damage to the folder ------------------------------------------------------------------------------------------------------
TEST(wrong_folders) {
    const char *copy = copy_golden("llama"), *empty = scratch_path("empty-folder");
    char path[PATH_MAX];
    expect_bad(scratch_path("nothing-here"),
               "nothing-here: No such file or directory; a model is a Hugging Face directory");
    mkdir(empty, 0777);
    expect_bad(empty, "empty-folder: holds no config.json");
    run_command("rm '%s/model.safetensors'", copy, "");
    expect_bad(copy, "model: holds neither model.safetensors nor model.safetensors.index.json");
    run_command("echo > '%s/pytorch_model.bin'", copy, "");
    expect_bad(copy, "save the model as safetensors (pytorch_model.bin is not read)");
    run_command("mkdir '%s/model.safetensors'", copy, "");
    expect_bad(copy, "model.safetensors: is not a regular file");
    run_command("rmdir '%s/model.safetensors' && mkfifo '%s/model.safetensors'", copy, copy);
    expect_bad(copy, "model.safetensors: is not a regular file");
    path_join(path, copy, CONFIG);
    write_file(path, "", 0);
    expect_bad(copy, "config.json: is empty");
    write_file(path, "{}", 2);
    expect_bad(copy, "config.json: has neither architectures nor model_type");
    write_file(path, "[]", 2);
    expect_bad(copy, "config.json: is not a JSON object");
    write_file(path, "{}\0{}", 5);
    expect_bad(copy, "config.json: is not valid JSON");
    assert_int_equal(truncate(path, (off_t)HF_CONFIG_MAX + 1), 0);
    expect_bad(copy, "config.json: has 16777217 bytes, more than the 16777216 such a file may have");
}

// Objects within objects, in the header of a file: neither the stack nor the patience of the reader ends.
TEST(nested_headers) {
    const size_t depth = 500000;
    const char *copy = copy_golden("llama");
    char *text = (char *)case_memory(depth * 5 + 10), path[PATH_MAX];
    size_t length = 0, i;
    for (i = 0; i < depth; i++) length += (size_t)sprintf(text + length, "{\"a\":");
    path_join(path, copy, MODEL);
    write_safetensors(path, text, length, "", 0);
    expect_bad(copy, "is not valid JSON");
    length = 0;
    for (i = 0; i < 900; i++) length += (size_t)sprintf(text + length, "{\"a\":");
    text[length++] = '1';
    memset(text + length, '}', 900);
    write_safetensors(path, text, length + 900, "", 0);
    expect_bad(copy, "its entry has the key \"a\"");
}

// A JSON text that would become gigabytes of tree.
TEST(json_bombs) {
    const char *copy = copy_golden("llama");
    const size_t length = 12u << 20;
    char path[PATH_MAX], *text = (char *)case_memory(length);
    path_join(path, copy, CONFIG);
    memset(text, ',', length);
    write_file(path, text, length);
    expect_bad(copy, "config.json: holds more than 2097152 JSON values");
    memset(text, '[', 1u << 20);
    write_file(path, text, 1u << 20);
    expect_bad(copy, "config.json: is not valid JSON"); // and no stack overflow
}

// ---- damage to the bytes of a safetensors file ------------------------------------------------------------------------------------
TEST(wrong_safetensors_bytes) {
    const char *copy = copy_golden("llama");
    char path[PATH_MAX], *file;
    size_t bytes;
    uint64_t header;
    path_join(path, copy, MODEL);
    file = read_whole(path, &bytes);
    write_file(path, file, 7);
    expect_bad(copy, "is too short for a safetensors file");
    write_file(path, "version https://git-lfs.github.com/spec/v1\noid", 46);
    expect_bad(copy, "model.safetensors: is a pointer of git-lfs, not the file itself");
    write_file(path, file, 1000);
    expect_bad(copy, "model.safetensors: claims a header of 2120 bytes; it has 1000 bytes");
    write_file(path, file, bytes - 1);
    expect_bad(copy, "reaches to byte 165600 of the data, of which there are 165599; is the file truncated?");
    write_file(path, file, bytes + 1); // read_whole leaves a zero behind the text
    expect_bad(copy, "1 bytes behind the last tensor belong to none");
    header = 100000001;
    memcpy(file, &header, 8);
    write_file(path, file, bytes);
    assert_int_equal(truncate(path, 200000000), 0);
    expect_bad(copy, "claims a header of 100000001 bytes");
    header = UINT64_MAX;
    memcpy(file, &header, 8);
    write_file(path, file, bytes);
    expect_bad(copy, "claims a header of 18446744073709551615 bytes");
    header = 0;
    memcpy(file, &header, 8);
    write_file(path, file, bytes);
    expect_bad(copy, "model.safetensors: is not valid JSON");
    write_file(path, file, 0);
    expect_bad(copy, "model.safetensors: is empty");
}

// ---- flat .bin ------------------------------------------------------------------------------------------------------------------------
// Writes `header` and `bytes` of data; with `sign` the checksum is made right.
static void write_flat(const char *path, FlatHeader header, const char *data, size_t bytes, int sign) {
    char *file = (char *)case_memory(sizeof(header) + bytes);
    if (sign) header.checksum = flat_checksum(&header);
    memcpy(file, &header, sizeof(header));
    memcpy(file + sizeof(header), data, bytes);
    write_file(path, file, sizeof(header) + bytes);
}

TEST(wrong_flat_files) {
    const char *path = scratch_path("model.bin");
    WeightSource *source = weights_open(GOLDEN "llama-tied");
    FlatHeader good, bad;
    size_t bytes, data;
    char *file;
    weights_convert(source, path, DTYPE_BF16);
    weights_close(source);
    file = read_whole(path, &bytes);
    data = bytes - sizeof(good);
    memcpy(&good, file, sizeof(good));
    write_flat(path, good, file + sizeof(good), data, 1);
    expect_good(path);
#define EXPECT_BAD_HEADER(change, sign, words)                                                                         \
    do {                                                                                                               \
        bad = good;                                                                                                    \
        change;                                                                                                        \
        write_flat(path, bad, file + sizeof(good), data, sign);                                                        \
        expect_bad(path, words);                                                                                       \
    } while (0)
    EXPECT_BAD_HEADER(bad.magic[0] = 's', 1, "model.bin: is neither a flat .bin nor an llm.c GPT-2 .bin");
    EXPECT_BAD_HEADER(bad.byte_order = FLAT_BYTE_ORDER_REV, 1, "was written on a machine of the other byte order");
    EXPECT_BAD_HEADER(bad.byte_order = 3, 1, "its byte order mark is damaged");
    EXPECT_BAD_HEADER(bad.version = 2, 1, "is a flat .bin of version 2, this program reads version 1");
    EXPECT_BAD_HEADER(bad.header_bytes = 1ull << 62, 1, "claims a header of 4611686018427387904 bytes");
    EXPECT_BAD_HEADER(bad.config[9] ^= 1, 0, "its header is damaged (checksum)");
    EXPECT_BAD_HEADER(bad.dtype = 4, 1, "element type 4 is unknown");
    EXPECT_BAD_HEADER(bad.elements++, 1, "claims 25249 elements, its model has 25248");
    EXPECT_BAD_HEADER(bad.elements = UINT64_MAX, 1, "claims 18446744073709551615 elements");
    EXPECT_BAD_HEADER(bad.dtype = DTYPE_FP32, 1, "so it is truncated; 105088 were expected");
    EXPECT_BAD_HEADER(memset(bad.config, 'a', sizeof(bad.config)), 1, "the model in its header has no end");
    EXPECT_BAD_HEADER(memset(bad.config, 0, sizeof(bad.config)), 1, "unknown model ''");
    EXPECT_BAD_HEADER(strcpy(bad.config, "mamba,hidden_size=4"), 1, "model.bin: unknown model 'mamba'");
    EXPECT_BAD_HEADER(strcpy(bad.config, "llama,hidden_size=-4"), 1, "model.bin: hidden_size=-4 is not a whole number");
    EXPECT_BAD_HEADER(strcpy(bad.config, "llama,layers=4"), 1, "model.bin: unknown key 'layers'");
    write_file(path, file, bytes - 1);
    expect_bad(path, "so it is truncated");
    write_file(path, file, 4095);
    expect_bad(path, "is truncated: 4095 bytes, the header alone has 4096");
    write_file(path, file, bytes + 1);
    expect_bad(path, "so something is behind the weights");
    write_file(path, file, 3);
    expect_bad(path, "is neither a flat .bin nor an llm.c GPT-2 .bin; a Hugging Face model is given as its directory");
    write_file(path, file, 0);
    expect_bad(path, "model.bin: is empty");
    expect_bad("/dev/null", "/dev/null: is not a regular file");
    expect_bad(GOLDEN "llama/model.safetensors", "give the directory it is in");
}

// ---- llm.c ------------------------------------------------------------------------------------------------------------------------------
TEST(wrong_llmc_files) {
    static const struct {
        int field, value;
        const char *words;
    } cases[] = {
        {0, (int)__builtin_bswap32(20240326), "was written on a machine of the other byte order"},
        {0, 20240520, "is a token shard of llm.c; it belongs to --data"},
        {0, 20240803, "is a Llama 3 checkpoint of llm.c, which is not supported"},
        {1, 1, "is an llm.c model of version 1; 3 (fp32) and 5 (bf16) are read"},
        {2, -1, "max_position_embeddings=-1 is not a whole number"},
        {3, 0, "vocab_size=0 is out of range"},
        {4, 2000000000, "num_hidden_layers=2000000000 is out of range"},
        {4, 3, "so it is truncated"},
        {4, 1, "so something is behind the weights"},
        {5, 7, "hidden_size 24 is not a multiple of num_attention_heads 7"},
        {6, 25, "hidden_size 25 is not a multiple of num_attention_heads 3"},
        {7, 100, "padded vocabulary 100 does not fit vocabulary 101"},
        {7, 2147483647, "padded vocabulary 2147483647 does not fit vocabulary 101"},
        {7, 256, "so it is truncated"},
    };
    const char *path = scratch_path("gpt2.bin");
    size_t i, bytes;
    for (i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char *file;
        test_case("field %d is %d", cases[i].field, cases[i].value);
        file = read_whole(GOLDEN "gpt2/gpt2_llmc_bf16.bin", &bytes);
        memcpy(file + 4 * cases[i].field, &cases[i].value, 4);
        write_file(path, file, bytes);
        expect_bad(path, cases[i].words);
    }
    test_case("lengths");
    {
        char *file = read_whole(GOLDEN "gpt2/gpt2_llmc_bf16.bin", &bytes);
        write_file(path, file, bytes - 2);
        expect_bad(path, "so it is truncated");
        write_file(path, file, 1000);
        expect_bad(path, "is truncated: 1000 bytes, the header alone has 1024");
        write_file(path, file, bytes + 1);
        expect_bad(path, "so something is behind the weights");
    }
}

// ---- random damage ------------------------------------------------------------------------------------------------------------------------
enum { BATCH = 100 };

typedef struct {
    const char *golden,
        *file;    // what is damaged; a copy of the folder is opened, or the file itself where golden is NULL
    size_t bytes; // of the file's beginning, where damage may lie
} Victim;

typedef struct {
    const Victim *victim;
    const char *original, *path, *model;
    size_t bytes, batch;
    size_t *running, *opened; // shared with the parent
} Damage;

// One or two changes: a bit, a byte, a piece taken out, doubled or cut off, a number put in its place.
static size_t damage(char *file, size_t bytes, size_t limit) {
    static const char *const numbers[] = {
        "-1",         "0",   "1e999", "18446744073709551616", "9007199254740993", "null", "[]", "{}", "\"\"",
        "4294967295", "0.5", "true"};
    size_t changes = 1 + test_random_below(2), n, at, length;
    while (changes-- && bytes > 16) {
        limit = min_size(limit, bytes);
        at = test_random_below(limit);
        n = min_size(1 + test_random_below(40), bytes - at);
        switch (test_random_below(8)) {
        case 0: file[at] ^= (char)(1 << test_random_below(8)); break;
        case 1: file[at] = (char)test_random(); break;
        case 2: file[at] = "{}[],:\"\\0-e. "[test_random_below(13)]; break;
        case 3: memmove(file + at, file + at + n, bytes - at - n), bytes -= n; break;
        case 4: memmove(file + at + n, file + at, bytes - at), bytes += n; break; // there is room for 4 x 40 bytes
        case 5: bytes = 1 + at; break;
        case 6: // a number in the text
            while (at < limit && !(file[at] >= '0' && file[at] <= '9')) at++;
            length = strlen(numbers[n % 12]);
            memmove(file + at + length, file + at, bytes - at);
            memcpy(file + at, numbers[n % 12], length), bytes += length;
            break;
        default: memset(file + at, (int)test_random_below(256), n);
        }
    }
    return bytes;
}

// The length before a safetensors header, or the checksum of a flat header, made right: or the damage stops at the first check.
static void repair(char *file, size_t bytes, const char *name, size_t longer_by) {
    FlatHeader *header = (FlatHeader *)(void *)file;
    uint64_t length;
    if (text_ends_with(name, ".safetensors") && bytes > 8) {
        memcpy(&length, file, 8);
        length += longer_by;
        memcpy(file, &length, 8);
    } else if (text_ends_with(name, "flat.bin") && bytes >= sizeof(*header)) {
        header->checksum = flat_checksum(header);
    }
}

static void open_and_read(const char *path) {
    WeightSource *source = weights_open(path);
    size_t i;
    for (i = 0; i < source->model.parameter_count; i++) {
        size_t count = min_size(parameter_elements(&source->model.parameters[i]), 4096);
        char values[4096 * 4];
        weights_read(source, i, parameter_elements(&source->model.parameters[i]) - count, count, DTYPE_FP32, values);
    }
    weights_close(source);
}

static void close_above(int first) {
    int fd;
    for (fd = first; fd < first + 8; fd++) close(fd);
}

static void damage_batch(const void *context) {
    const Damage *d = (const Damage *)context;
    struct rlimit limit = {60, 60}; // seconds of processor time: a hang ends here
    struct rusage usage;
    jmp_buf back;
    volatile size_t i;
    int first = dup(STDIN_FILENO);
    close(first);
    setrlimit(RLIMIT_CPU, &limit);
    if (!freopen("/dev/null", "w", stderr)) exit(1);
    testing.random = d->batch * 1000003;
    for (i = 0; i < BATCH; i++) {
        char *file = (char *)case_memory(d->bytes + 1024);
        size_t bytes;
        *d->running = d->batch * BATCH + i;
        memcpy(file, d->original, d->bytes);
        bytes = damage(file, d->bytes, d->victim->bytes);
        if (test_random_below(4)) repair(file, bytes, d->victim->file, bytes - d->bytes);
        write_file(d->path, file, bytes);
        exit_return = &back;
        if (!setjmp(back)) {
            open_and_read(d->model);
            ++*d->opened;
        }
        exit_return = NULL;
        close_above(first);
    }
    getrusage(RUSAGE_SELF, &usage);
    if (usage.ru_maxrss > 1 << 20) printf("took %ld KiB of memory\n", usage.ru_maxrss), fflush(stdout), _Exit(1);
    _Exit(0); // refusals end the program and so free nothing; here that is no leak
}

// As many batches as asked for: STREAMBP_DAMAGE=50 for a long run.
TEST(random_damage) {
    static const Victim victims[] = {
        {"llama", CONFIG, 1u << 20},
        {"gpt2", CONFIG, 1u << 20},
        {"qwen2", CONFIG, 1u << 20},
        {"llama-tied", MODEL, 2024},
        {"gpt2-hub", MODEL, 2416},
        {"llama-sharded", INDEX, 1u << 20},
        {"llama-sharded", "model-00002-of-00004.safetensors", 640},
        {NULL, "flat.bin", 400},
        {NULL, "gpt2_llmc.bin", 40},
    };
    const char *wanted = getenv("STREAMBP_DAMAGE");
    size_t batches = wanted ? (size_t)atol(wanted) : 3, v, b;
    size_t *shared = (size_t *)mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    WeightSource *source = weights_open(GOLDEN "qwen3");
    assert_true(shared != MAP_FAILED);
    weights_convert(source, scratch_path("flat.bin"), DTYPE_FP32);
    weights_close(source);
    run_command("cp '" GOLDEN "gpt2/gpt2_llmc_fp32.bin' '%s'", scratch_path("gpt2_llmc.bin"), "");
    for (v = 0; v < sizeof(victims) / sizeof(victims[0]); v++) {
        for (b = 0; b < batches; b++) {
            char path[PATH_MAX];
            const char *folder = victims[v].golden ? copy_golden(victims[v].golden) : scratch_folder();
            const Child *child;
            Damage d = {&victims[v], NULL, path, NULL, 0, b, &shared[0], &shared[1]};
            test_case("%s %s, batch %zu", victims[v].golden ? victims[v].golden : "", victims[v].file, b);
            path_join(path, folder, victims[v].file);
            d.model = victims[v].golden ? folder : path;
            d.original = read_whole(path, &d.bytes);
            child = run_child(damage_batch, &d);
            write_file(path, d.original, d.bytes);
            if (child->code != 0)
                test_fail("damage %zu ended the program with %d: %s", shared[0], child->code, child->out);
        }
    }
    test_case("all");
    printf("             %zu files damaged, %zu of them still could be read\n", v * batches * BATCH, shared[1]);
    if (shared[1] == 0 || shared[1] * 2 > v * batches * BATCH) test_fail("%zu could be read", shared[1]);
    munmap(shared, 4096);
}

static const struct CMUnitTest tests[] = {
    LISTED(wrong_texts),      LISTED(wrong_folders),           LISTED(nested_headers),
    LISTED(json_bombs),       LISTED(wrong_safetensors_bytes), LISTED(wrong_flat_files),
    LISTED(wrong_llmc_files), LISTED(random_damage),
};

int main(int argc, char **argv) { RUN_TESTS(argc, argv, tests, NULL, scratch_remove); }
