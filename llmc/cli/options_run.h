/*
Replaces --model RUN by options that mean the same. For a run of adapters: its base model, its --base, and --adapter
RUN. For `convert`: the folder of its tokenizer, as --like.
*/
#ifndef LLMC_OPTIONS_RUN_H
#define LLMC_OPTIONS_RUN_H
#include "llmc/files/run_source.h"
#include "option_rows.h"

// Sets --like of convert to the folder that the run began from.
static void options_take_like(Options *o, const char *run, const RunSource *source) {
    char config[PATH_MAX];
    const char *folder = source->text[SOURCE_FOLDER];
    const int to_file = o->to == CONVERT_FLAT || o->to == CONVERT_LLMC || (o->out && text_ends_with(o->out, ".bin"));
    if (o->verb != VERB_CONVERT || o->like || to_file || !*folder) return;
    path_join(config, folder, "config.json");
    if (path_exists(config))
        o->like = folder;
    else if (!o->quiet)
        note("--model %s: no tokenizer is written: its run began from %s, which is not there; give the folder with "
             "--like",
             run, config);
}

// Sets --model or --init to the base model of a run of adapters.
static void options_take_base(Options *o, const char *run, const RunSource *source) {
    static const char *const words[] = {"auto", "none", "nf4", "fp4"};
    const char *typed = source->text[SOURCE_MODEL], *path = source->text[SOURCE_PATH],
               *seed = source->text[SOURCE_SEED];
    o->model = *typed ? run_source_find(source) : NULL;
    if (*typed && !o->model)
        die("--model %s: holds adapters, whose base %s%s%s%s is not there; give --model BASE --adapter %s", run, typed,
            *path ? " (" : "", path, *path ? ")" : "", run);
    if (!*typed && !*source->text[SOURCE_INIT])
        die("--model %s: holds adapters and does not name their base; give --model BASE --adapter %s", run, run);
    if (!*typed) {
        size_t initial = o->seed;
        if (*seed) parse_size(seed, &initial);
        if (initial != o->seed && o->given[option_find("seed")])
            die("--model %s: holds adapters for the --init of --seed %s; leave --seed out, or give --model BASE "
                "--adapter %s",
                run, seed, run);
        o->init = source->text[SOURCE_INIT], o->seed = initial;
    }
    if (!o->rope_scaling && *source->text[SOURCE_SCALING]) o->rope_scaling = source->text[SOURCE_SCALING];
    if (!o->grow_vocabulary && *source->text[SOURCE_GROWN]) parse_size(source->text[SOURCE_GROWN], &o->grow_vocabulary);
    if (o->verb != VERB_CONVERT && o->base == BASE_AUTO)
        for (int i = BASE_AUTO; i <= BASE_FP4; i++)
            if (!strcmp(source->text[SOURCE_BASE], words[i]))
                o->base = (BaseWeights)i, o->quantise_head = *source->text[SOURCE_HEAD] != 0;
    if (!o->quiet) note("--model %s: holds adapters; their base %s is taken", run, *typed ? o->model : "of --init");
    if (o->model && !path_is_directory(o->model)) options_take_like(o, run, source);
}

static void options_follow_run(Options *o) {
    static RunSource source; // options point into it
    char checkpoint[PATH_MAX], part[PATH_MAX], hub[PATH_MAX];
    const char *run = o->model, *folder = run;
    Manifest manifest;
    if (run && !path_exists(run) && hub_snapshot(run, hub)) folder = hub;
    if (!run || !path_is_directory(folder)) return;
    path_join(part, folder, "config.json");
    if (path_exists(part)) return;
    checkpoint_quiet = 1;
    const int is_run = checkpoint_at_path(folder, checkpoint, &manifest);
    checkpoint_quiet = 0;
    path_join(part, folder, manifest_names[1][MANIFEST_CONFIG]);
    if (!is_run && !path_exists(part)) return;
    run_source_read(is_run ? checkpoint : folder, &source);
    if (is_run && !manifest.adapters) {
        options_take_like(o, run, &source);
        return;
    }
    if (o->verb == VERB_PLAN)
        die("--model %s: holds adapters; a plan takes their base, with --model or --init, and --lora-rank", run);
    if (o->adapter || o->lora_rank)
        die("--model %s: holds adapters; to train or read others give their base with --model", run);
    o->adapter = run, o->typed_model = run;
    o->merge = o->verb == VERB_CONVERT && !o->adapter_only;
    if (!o->adapter_only) options_take_base(o, run, &source);
}

#endif
