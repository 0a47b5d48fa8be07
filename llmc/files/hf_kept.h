/*
The small files of a model that a new folder keeps: all files except weights, config.json and the model card. Among them
are image processors' settings and further chat templates. The model card (README.md) describes the published weights,
so model_card.h writes a new card. Links that leave the model's folder are refused.
*/
#ifndef LLMC_HF_KEPT_H
#define LLMC_HF_KEPT_H
#include "hf_chat.h"
#include "llmc/base/output.h"
#include "weight_source.h"
#include <fnmatch.h>

#define HF_KEPT_MAX ((off_t)256 << 20) // most bytes of a copied file

// clang-format off
static const char *const hf_kept_names[] = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model*", "tekken.json", TOKENIZER_NAME, HF_GENERATION, "NOTICE*",
    TEMPLATE_NAME, "chat_template.json", "additional_chat_templates/*.jinja", "LICENSE*", "USE_POLICY*",
};
#define HF_IMAGE_NAMES "preprocessor_config.json|video_preprocessor_config.json|processor_config.json"
// clang-format on

static int hf_is_kept_name(const char *name) {
    for (size_t i = 0; i < sizeof(hf_kept_names) / sizeof(hf_kept_names[0]); i++)
        if (fnmatch(hf_kept_names[i], name, 0) == 0) return 1;
    return 0;
}

// Tells whether we write files of this name, so that a half-written folder with it is ours.
static int hf_is_written_name(const char *name) {
    return hf_is_kept_name(name) || text_is_one_of(name, "config.json|README.md|additional_chat_templates") ||
           text_is_one_of(name, HF_IMAGE_NAMES "|" HF_MODELOPT) || fnmatch("model*.safetensors*", name, 0) == 0;
}

typedef struct {
    char (*names)[256];
    size_t count;
    uint64_t bytes;
} HfKeptFiles;

// Refuses a link that leaves the model's folder, because it could copy a private file into a published model. In
// Hugging Face's cache, links of snapshots/REVISION/ lead to blobs/ next to snapshots/.
static void hf_check_link(const char *folder, const char *path) {
    char root[PATH_MAX], above[PATH_MAX];
    struct stat status;
    if (!realpath(folder, root)) die("%s: cannot be resolved: %s; check the path", folder, error_text(errno));
    folder_above(above, root);
    if (text_ends_with(above, "/snapshots")) folder_above(root, above);
    if (stat(root, &status) == 0 && !path_lies_in(path, &status))
        die("%s: is a link that leads out of %s; put the file itself there", path, root);
}

static void hf_add_kept(HfKeptFiles *kept, const char *name) {
    kept->names = (char(*)[256])checked_realloc(kept->names, (kept->count + 1) * sizeof(*kept->names), name);
    snprintf(kept->names[kept->count++], sizeof(*kept->names), "%s", name);
}

// Adds the model's small files in a folder to *kept. within: "" or "SUBFOLDER/". also: further names "a|b", or ""
static void hf_find_kept(HfKeptFiles *kept, const char *folder, const char *within, const char *also) {
    char path[PATH_MAX], name[256];
    const struct dirent *entry;
    path_join(path, folder, within);
    DIR *directory = opendir(path);
    if (!directory) die("%s: cannot be listed: %s; check its permissions", path, error_text(errno));
    while ((entry = readdir(directory))) {
        struct stat status;
        snprintf(name, sizeof(name), "%s%s", within, entry->d_name);
        path_join(path, folder, name);
        if (!strcmp(name, "additional_chat_templates")) hf_find_kept(kept, folder, "additional_chat_templates/", "");
        if (!hf_is_kept_name(name) && !text_is_one_of(name, also)) continue;
        if ((stat(path, &status) == 0 && S_ISDIR(status.st_mode))) continue;
        if (stat(path, &status) != 0)
            die("%s: this file of the model cannot be read: %s; put it there or remove the link", path,
                error_text(errno));
        hf_check_link(folder, path);
        if (status.st_size > HF_KEPT_MAX)
            die("%s: has %lld bytes, too many for a small file of a model; remove it or put the right file there", path,
                (long long)status.st_size);
        hf_add_kept(kept, name);
        kept->bytes += (uint64_t)status.st_size;
    }
    closedir(directory);
    if (kept->count) qsort(kept->names, kept->count, sizeof(name), compare_texts);
}

// ---- copying --------------------------------------------------------------------------------------------------------
// Copies the bytes of a tensor. Refuses values that are not finite.
static void hf_copy_tensor(const InputFile *input, const SafeTensor *t, const OutputFile *output, uint64_t at) {
    uint64_t n;
    for (uint64_t done = 0, bytes = t->end - t->begin; done < bytes; done += n) {
        n = bytes - done < sizeof(staged_raw) ? bytes - done : sizeof(staged_raw);
        input_read(input, t->begin + done, staged_raw.bytes, (size_t)n);
        // A bound of rank 0 may be infinite, so only tensors of rank 1 or more are checked.
        if (t->type != DTYPE_COUNT && t->rank)
            source_refuse_bad(input->path, t->name, t->rank == 2 ? (size_t)t->shape[1] : 0, done / dtype_size(t->type),
                              n / dtype_size(t->type), t->type, staged_raw.bytes);
        output_write(output, at + done, staged_raw.bytes, (size_t)n);
    }
}

// Copies a file's bytes unchecked.
static void hf_copy_file(OutputFolder *folder, const char *path, const char *name) {
    struct stat status;
    OutputFile output;
    if (stat(path, &status) == 0 && S_ISREG(status.st_mode) && status.st_size == 0) {
        folder_write_file(folder, name, "", 0); // input_open refuses empty files
        return;
    }
    InputFile input = input_open(path);
    SafeTensor whole = {0};
    whole.type = DTYPE_COUNT, whole.end = input.bytes;
    folder_open_file(folder, &output, name, input.bytes);
    hf_copy_tensor(&input, &whole, &output, 0);
    input_close(&input);
    output_commit(&output);
}

#endif
