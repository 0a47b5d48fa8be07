/*
Names of Hugging Face's hub. A name such as Qwen/Qwen3-0.6B means its snapshot in Hugging Face's cache, unless a path of
that name exists. hub_fetch fills the cache with Hugging Face's command `hf`; the other functions only look into it.
*/
#ifndef LLMC_HUB_H
#define LLMC_HUB_H
#include "llmc/base/file.h"
#include "llmc/ranks/dist.h"
#include <spawn.h>
#include <sys/wait.h>

typedef enum { DOWNLOAD_ASK, DOWNLOAD_YES, DOWNLOAD_NO } Download; // the answer of --download

// ---- the cache ------------------------------------------------------------------------------------------------------
// Finds Hugging Face's model cache: $HF_HUB_CACHE, or else hub/ in $HF_HOME.
static void hub_cache(char cache[PATH_MAX]) {
    static const char *const places[][2] = {{"HF_HUB_CACHE", ""},
                                            {"HUGGINGFACE_HUB_CACHE", ""},
                                            {"HF_HOME", "/hub"},
                                            {"XDG_CACHE_HOME", "/huggingface/hub"},
                                            {"HOME", "/.cache/huggingface/hub"}};
    *cache = 0;
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]) && !*cache; i++) {
        const char *place = getenv(places[i][0]);
        if (place && *place) snprintf(cache, PATH_MAX, "%s%s", place, places[i][1]);
    }
}

static const char hub_letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";

static int hub_is_name(const char *path) {
    const size_t owner = strspn(path, hub_letters), name = path[owner] ? strspn(path + owner + 1, hub_letters) : 0;
    return owner && name && *path != '.' && path[owner] == '/' && !path[owner + 1 + name] &&
           !text_ends_with(path, ".bin");
}

// Finds the cached snapshot of a hub name. Returns 0 if there is none.
static int hub_snapshot(const char *path, char found[PATH_MAX]) {
    char cache[PATH_MAX], reference[PATH_MAX], commit[65] = "";
    if (!hub_is_name(path)) return 0;
    const size_t owner = strcspn(path, "/");
    hub_cache(cache);
    snprintf(found, PATH_MAX, "%.1024s/models--%.*s--%s", cache, (int)owner, path, path + owner + 1);
    snprintf(reference, PATH_MAX, "%.2048s/refs/main", found);
    const int fd = file_open(reference, O_RDONLY), known = fd >= 0 && read(fd, commit, sizeof(commit) - 1) > 0;
    if (fd >= 0) close(fd);
    commit[strspn(commit, hub_letters)] = 0;
    snprintf(found + strlen(found), PATH_MAX - strlen(found), "/snapshots/%s", commit);
    return known && path_is_directory(found);
}

// Returns the commit that names a snapshot's folder; NULL: another folder
static const char *hub_revision(const char *folder) {
    char above[PATH_MAX];
    folder_above(above, folder);
    return strcmp(path_last(above), "snapshots") ? NULL : path_last(folder);
}

// Returns `path`, or the snapshot that it names, stored in `found`. Prints a note unless `quiet`. option: "--model"
static const char *hub_path_find(const char *option, const char *path, char found[PATH_MAX], int quiet) {
    if (!path || path_exists(path) || !hub_is_name(path)) return path;
    if (!hub_snapshot(path, found))
        die("%s %s: %s, nor is it in Hugging Face's cache; type: hf download %s --local-dir %s", option, path,
            strerror(ENOENT), path, strchr(path, '/') + 1);
    if (!quiet) note("%s %s: using %s", option, path, found);
    return found;
}

// ---- downloads ------------------------------------------------------------------------------------------------------
// Tells whether a folder of $PATH has the command hf.
static int hf_found(void) {
    const char *path = getenv("PATH");
    char file[PATH_MAX];
    for (size_t length; path && *path; path += length + (path[length] == ':')) {
        length = strcspn(path, ":");
        snprintf(file, sizeof(file), "%.*s/hf", (int)length, path);
        if (access(file, X_OK) == 0) return 1;
    }
    return 0;
}

// Tells whether to download `path`: it is not in the cache, or an earlier download of it did not end, and the user
// agrees. Without a terminal nobody is asked.
static int hub_wants(const char *option, const char *path, Download answer) {
    char found[PATH_MAX], blobs[PATH_MAX], line[16] = "";
    if (answer == DOWNLOAD_NO || path_exists(path)) return 0;
    const int there = hub_snapshot(path, found);
    folder_above(blobs, found), folder_above(found, blobs), path_join(blobs, found, "blobs");
    if (there && !*folder_matches(blobs, "*.incomplete")) return 0;
    if (!hf_found() && answer == DOWNLOAD_ASK) return 0;
    if (!hf_found()) die("--download yes: no folder of $PATH has the command hf; type: pip install huggingface_hub");
    if (answer == DOWNLOAD_YES) return 1;
    if (!isatty(STDIN_FILENO) || !isatty(STDERR_FILENO)) return 0;
    fprintf(stderr, "%s %s: is not here, nor%s in Hugging Face's cache. Download it with hf? [Y/n] ", option, path,
            there ? " whole" : "");
    return fgets(line, sizeof(line), stdin) && strchr("\nyY", *line);
}

// Starts hf download. Its output goes to stderr: stdout is for results.
static pid_t hf_spawn(const char *path) {
    char *argv[4] = {(char *)"hf", (char *)"download", (char *)path, NULL};
    posix_spawn_file_actions_t files;
    pid_t process;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&files, STDERR_FILENO, STDOUT_FILENO);
    const int error = posix_spawnp(&process, "hf", &files, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&files);
    if (error) die("hf download %s: cannot be started: %s; try the command in a shell", path, strerror(error));
    return process;
}

// Downloads the hub name `path` if it is not in the cache and the user agrees. Rank 0 downloads; the others wait, and
// hear from it twice a second. Collective.
static void hub_fetch(const char *option, const char *path, Download answer) {
    const struct timespec pause = {0, 500000000};
    pid_t process = 0;
    if (!path || !hub_is_name(path)) return;
    if (dist_rank() == 0 && hub_wants(option, path, answer)) process = hf_spawn(path);
    for (int running = 1, status = 0;;) {
        if (running) running = process && waitpid(process, &status, WNOHANG) == 0;
        int told[2] = {running, status};
        dist_broadcast(RANKS_ALL, told, sizeof(told), 0);
        if (told[1])
            die("%s %s: hf download %s failed (%s %d), as it says above; a gated model needs: hf auth login", option,
                path, path, WIFEXITED(told[1]) ? "exit code" : "signal",
                WIFEXITED(told[1]) ? WEXITSTATUS(told[1]) : WTERMSIG(told[1]));
        if (!told[0]) return;
        nanosleep(&pause, NULL);
    }
}

#endif
