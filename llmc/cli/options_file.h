/*
--config FILE: options in a file, read as the words of a command line. A file holds one of these:

    lines    --option value, quoted as for a shell; a line's first word may lack its dashes; # begins a comment
    JSON     an object {"option": value, ...}: true is a flag, false and null are nothing, a list gives several values
    a log    log.jsonl of a run, or the run's folder: the options of its last part, without --out, --resume, --extend
             and --overwrite, so that no run writes into another run's folder by accident. --resume without --data
             reads the log of --out, and keeps its --extend

options.h parses the words; the command line has precedence.

--model RUN stands for several options. For a run of adapters: its base model, its --base, and --adapter RUN. For
`convert`: the folder of its tokenizer, as --like.
*/
#ifndef LLMC_OPTIONS_FILE_H
#define LLMC_OPTIONS_FILE_H
#include "llmc/files/run_paths.h"
#include "llmc/files/run_source.h"
#include "options_out.h"

#define OPTION_FILE_LIMIT (1 << 20) // most bytes of a file; of a log, most bytes of a line

typedef struct {
    char **word;  // [count]
    size_t *line; // [count] line of each word in the file
    size_t count;
    char *text, *end;   // memory of the words, and its end
    int logged, of_run; // logged: from a log; of_run: all options of a run, with defaults
} OptionWords;

static void words_begin(OptionWords *w, size_t line) {
    w->line[w->count] = line;
    w->word[w->count++] = w->end;
}

static void words_put(OptionWords *w, const char *text, size_t bytes) {
    memcpy(w->end, text, bytes);
    w->end += bytes;
}

static void words_from_lines(OptionWords *w, const char *c, const char *path) {
    int first = 1; // 1: the next word is the first word of a line
    for (size_t line = 1;;) {
        c += strspn(c, " \t\r");
        if (*c == '#') c += strcspn(c, "\n");
        if (!*c) return;
        if (*c == '\n') {
            line++, c++, first = 1;
            continue;
        }
        words_begin(w, line);
        if (first && *c != '-') words_put(w, "--", 2);
        for (first = 0; !strchr(" \t\r\n", *c);) {
            const size_t quoted = *c == '\'' || *c == '"';
            const size_t length = quoted ? strcspn(c + 1, *c == '"' ? "\"\n" : "'\n") : strcspn(c, " \t\r\n'\"");
            if (quoted && c[1 + length] != *c) die("%s:%zu: a quote is not closed on its line; close it", path, line);
            words_put(w, c + quoted, length);
            c += length + 2 * quoted;
        }
        *w->end++ = 0;
    }
}

// Appends a key's values to its word: --name=1,2. A list of paths becomes one word per path, as a shell passes them:
// --data=a b.
static void words_put_values(OptionWords *w, const cJSON *item, int paths, const char *path) {
    const int list = cJSON_IsArray(item);
    char number[64];
    for (const cJSON *value = list ? item->child : item; value; value = list ? value->next : NULL) {
        const int first = !list || value == item->child;
        const char *text = cJSON_IsString(value) ? value->valuestring : json_scalar_text(value, number, sizeof(number));
        if (!cJSON_IsNumber(value) && !cJSON_IsString(value))
            die("%s: \"%.64s\" is %s, but every option takes text or a number", path, item->string, text);
        if (!first && paths) {
            *w->end++ = 0;
            words_begin(w, w->line[w->count - 1]);
        } else {
            words_put(w, first ? "=" : ",", 1);
        }
        words_put(w, text, strlen(text));
    }
}

// Options of earlier versions that logs still name. At these default values they have no effect.
static const struct { const char *key, *usual; } options_gone[] = {{"draw", "independent"}, {"clamp", "0"}};

// Returns 1 for an option that this version no longer has and that is logged at its default: skip it. Refuses every
// other value, because it biased the gradient.
static int option_is_gone(const cJSON *item, const char *path) {
    for (size_t i = 0; i < sizeof(options_gone) / sizeof(options_gone[0]); i++) {
        char number[64];
        if (strcmp(item->string, options_gone[i].key) != 0) continue;
        const char *text = cJSON_IsString(item) ? item->valuestring : json_scalar_text(item, number, sizeof(number));
        if (!strcmp(text, options_gone[i].usual)) return 1;
        die("%s: its run had --%s %.32s, which this version does not have; give the run's other options without "
            "--config",
            path, item->string, text);
    }
    return 0;
}

// Adds a word for each key. text: the file from line `line` on, to find each key's line; NULL: all keys are on `line`
static void words_from_json(OptionWords *w, const cJSON *options, const char *text, size_t line, const char *path) {
    const cJSON *item;
    cJSON_ArrayForEach(item, options) {
        char name[64];
        const int index = option_find(option_name(item->string, name));
        if (cJSON_IsNull(item) || cJSON_IsFalse(item) || (cJSON_IsArray(item) && !item->child)) continue;
        if (text_is_one_of(item->string, w->logged ? "verb|out|resume|overwrite" : "verb")) continue;
        if (w->logged && option_is_gone(item, path)) continue;
        const char *at = text ? strstr(text, item->string) : NULL; // keys come in order; NULL for an escaped key
        for (; text && text < at; text++) line += *text == '\n';
        text = at;
        words_begin(w, line);
        words_put(w, "--", 2);
        words_put(w, item->string, strlen(item->string));
        if (!cJSON_IsTrue(item)) words_put_values(w, item, index >= 0 && option_rows[index].kind == OPTION_PATHS, path);
        *w->end++ = 0;
    }
}

// Returns the last line of a log that holds options.
static char *option_record(const char *path, size_t *line) {
    char *text = (char *)checked_malloc(OPTION_FILE_LIMIT, path),
         *last = (char *)checked_malloc(OPTION_FILE_LIMIT, path);
    InputFile input = input_open(path);
    FILE *file = fdopen(input.fd, "r");
    if (!file) die("%s: cannot be read: %s; check its permissions", path, error_text(errno));
    *last = 0;
    for (size_t number = 1; fgets(text, OPTION_FILE_LIMIT, file); number += strchr(text, '\n') != NULL)
        if (strstr(text, "\"options\": {")) strcpy(last, text), *line = number;
    if (!*last) die("%s: holds no record of a run's options; give a run's log.jsonl or its folder", path);
    fclose(file), free(input.path), free(text);
    return last;
}

// Returns 1 for a word without control characters other than tabs and line ends. Words are printed, and a terminal
// would obey other control characters.
static int word_is_text(const char *word) {
    for (const unsigned char *c = (const unsigned char *)word; *c; c++)
        if ((*c < 0x20 && !strchr("\t\n\r", *c)) || *c == 0x7f || (*c == 0xc2 && c[1] < 0xa0)) return 0;
    return 1;
}

// Reads the words of --config. They stay until the program ends, because options point into them. resumes: also reads
// the run's notes
static const OptionWords *option_words_read(const char *given, int resumes) {
    static OptionWords words;
    OptionWords *w = &words;
    char path[PATH_MAX];
    free(w->word), free(w->line), free(w->text);
    memset(w, 0, sizeof(*w));
    size_t length, line = 1;
    snprintf(path, sizeof(path), "%s", given);
    if (path_is_directory(given) && !path_found(path, given, RECORDS_NAME))
        die("--config %s: holds no " RECORDS_NAME " of a run; give a run's folder, or a file of options", given);
    const int log = text_ends_with(path, ".jsonl");
    char *text = log ? option_record(path, &line) : input_read_text(path, OPTION_FILE_LIMIT, &length);
    if (log) length = strlen(text);
    if (strlen(text) != length) die("%s: holds a zero byte; give a file of options", path);
    if (!strncmp(text, "\xef\xbb\xbf", 3)) memset(text, ' ', 3); // a byte order mark
    w->word = (char **)checked_calloc(length + 1, sizeof(char *), path);
    w->line = (size_t *)checked_calloc(length + 1, sizeof(size_t), path);
    w->text = w->end = (char *)checked_calloc(length + 1, 32, path); // room for numbers written with more digits
    if (text[strspn(text, " \t\r\n")] == '{') {
        cJSON *root = json_parse_object(text, length, path);
        const cJSON *options = json_get(root, "options"), *said;
        w->logged = cJSON_IsObject(options), w->of_run = w->logged || json_get(root, "verb");
        cJSON_ArrayForEach(said, json_get(root, "notes")) if (resumes && cJSON_IsString(said))
            note_keep(said->valuestring);
        words_from_json(w, w->logged ? options : root, log ? NULL : text, line, path);
        cJSON_Delete(root);
    } else {
        words_from_lines(w, text, path);
    }
    for (size_t i = 0; i < w->count; i++)
        if (!word_is_text(w->word[i])) die("%s:%zu: holds control characters; remove them", path, w->line[i]);
    free(text);
    return w;
}

// ---- --model RUN ---------------------------------------------------------------------------------------------------
// Sets --like of `convert` to the folder from which the run began.
static void options_take_like(Options *o, const char *run, const RunSource *source) {
    char config[PATH_MAX];
    const char *folder = source->text[SOURCE_FOLDER];
    const int to_file = o->to == CONVERT_FLAT || o->to == CONVERT_LLMC || (o->out && text_ends_with(o->out, ".bin"));
    if (o->verb != VERB_CONVERT || o->like || to_file || !*folder) return;
    if (path_found(config, folder, "config.json"))
        o->like = folder;
    else if (!o->quiet)
        note("--model %s: no tokenizer is written: its run began from %s, which is not there; give the folder with "
             "--like",
             run, config);
}

// Returns the answer of --download; a plan, which needs no weights, downloads only with --download yes.
static Download download_answer(const Options *o) {
    return o->verb == VERB_PLAN && o->download == DOWNLOAD_ASK ? DOWNLOAD_NO : o->download;
}

// Downloads hub names that are not in the cache. Collective.
static void options_download(const Options *o) {
    hub_fetch("--model", o->model, download_answer(o));
    hub_fetch("--adapter", o->adapter, download_answer(o));
    hub_fetch("--like", o->like, download_answer(o));
}

// Sets --model to the base of a run's adapters: where the run had it, or by its hub name. Downloads it if the user
// agrees. Collective.
static void options_find_base(Options *o, const char *run, const RunSource *source) {
    const char *typed = source->text[SOURCE_MODEL], *path = source->text[SOURCE_PATH];
    const int is_here = run_source_find(source) != NULL, is_name = hub_is_name(typed);
    char option[PATH_MAX + 32];
    snprintf(option, sizeof(option), "--model %s, base", run);
    hub_fetch(option, typed, is_here ? DOWNLOAD_NO : download_answer(o)); // rank 0 decides
    o->model = run_source_find(source);
    if (!o->model)
        die("--model %s: holds adapters, whose base %s%s%s%s is not there; %s%s%sgive --model BASE --adapter %s", run,
            typed, *path ? " (" : "", path, *path ? ")" : "", is_name ? "type: hf download " : "", is_name ? typed : "",
            is_name ? ", or " : "", run);
}

// Sets --model or --init to the base model of a run of adapters.
static void options_take_base(Options *o, const char *run, const RunSource *source) {
    static const char *const words[] = {"auto", "none", "nf4", "fp4", "mxfp4", "fp8"};
    const char *typed = source->text[SOURCE_MODEL], *seed = source->text[SOURCE_SEED];
    o->model = NULL;
    if (*typed) options_find_base(o, run, source);
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
        for (int i = BASE_AUTO; i <= BASE_FP8; i++)
            if (!strcmp(source->text[SOURCE_BASE], words[i]))
                o->base = (BaseWeights)i, o->quantise_head = *source->text[SOURCE_HEAD] != 0;
    if (!o->quiet) note("--model %s: holds adapters; their base %s is taken", run, *typed ? o->model : "of --init");
    if (o->model && !path_is_directory(o->model)) options_take_like(o, run, source);
}

static void options_follow_run(Options *o) {
    static RunSource source; // options point into it
    char checkpoint[PATH_MAX], hub[PATH_MAX];
    const char *run = o->model, *folder = run;
    Manifest manifest;
    if (run && !path_exists(run) && hub_snapshot(run, hub)) folder = hub;
    if (!run || !path_is_directory(folder) || folder_has(folder, "config.json")) return;
    checkpoint_quiet = 1;
    const int is_run = checkpoint_at_path(folder, checkpoint, &manifest);
    checkpoint_quiet = 0;
    if (!is_run && !folder_has(folder, manifest_names[1][MANIFEST_CONFIG])) return;
    run_source_read(is_run ? checkpoint : folder, &source);
    if (is_run && !manifest.adapters) {
        options_take_like(o, run, &source);
        return;
    }
    if (o->verb == VERB_PLAN)
        die("--model %s: holds adapters; a plan takes their base, with --model or --init, and --lora-rank", run);
    if (o->adapter || o->lora_rank)
        die("--model %s: holds adapters; to train or read others give their base with --model", run);
    o->adapter = run;
    o->merge = o->verb == VERB_CONVERT && !o->adapter_only;
    if (!o->adapter_only || o->adapter_layout == ADAPTER_PER_EXPERT) options_take_base(o, run, &source);
}

#endif
