/*
Opens CUDA's libraries at first use; they are never linked, so a program starts, plans and converts without them.
Searches in this order: the folders of STREAMBP_LIBRARIES (a:b), lib/ in each, lib/ in each folder of it (like wheels in
site-packages/nvidia); LD_LIBRARY_PATH; the build's folders; the system's.
*/
#ifndef LLMC_CUDA_LIBRARY_H
#define LLMC_CUDA_LIBRARY_H
#include "llmc/base/utils.h"
#include <dlfcn.h>
#include <glob.h>

#if defined(CUDART_VERSION) && CUDART_VERSION < 13000
#define CUDA_MAJOR "12"
#define CUDA_WHEEL "-cu12"
#else
#define CUDA_MAJOR "13"
#define CUDA_WHEEL ""
#endif

typedef struct {
    const char *name, *file, *package, *wheel; // package: its name on Debian and Ubuntu, in NVIDIA's repository
} Library;
static const Library LIBRARY_CUBLASLT = {"cuBLASLt", "libcublasLt.so." CUDA_MAJOR, "libcublas-" CUDA_MAJOR "-0",
                                         "nvidia-cublas" CUDA_WHEEL},
                     LIBRARY_CUDNN = {"cuDNN", "libcudnn.so.9", "libcudnn9-cuda-" CUDA_MAJOR,
                                      "nvidia-cudnn-cu" CUDA_MAJOR},
                     LIBRARY_CUDART = {"CUDA's runtime", "libcudart.so." CUDA_MAJOR, "cuda-cudart-" CUDA_MAJOR "-0",
                                       "nvidia-cuda-runtime" CUDA_WHEEL},
                     LIBRARY_NCCL = {"NCCL", "libnccl.so.2", "libnccl2", "nvidia-nccl-cu" CUDA_MAJOR};

// Opens the first file that dlopen takes, or returns NULL. why: the error of the first file found
static void *library_file(const char *file, char why[200]) {
    const char *folders = getenv("STREAMBP_LIBRARIES");
    void *library = NULL;
    *why = 0;
    for (size_t n; folders && *folders; folders += n + (folders[n] == ':')) {
        char pattern[PATH_MAX];
        glob_t found;
        n = strcspn(folders, ":");
        snprintf(pattern, sizeof(pattern), "%.*s/{,lib/,*/lib/}%s", (int)n, folders, file);
        if (n && !glob(pattern, GLOB_BRACE, NULL, &found)) {
            for (size_t i = 0; i < found.gl_pathc && !library; i++) {
                library = dlopen(found.gl_pathv[i], RTLD_NOW | RTLD_GLOBAL);
                if (!library && !*why) snprintf(why, 200, "%s", dlerror());
            }
            globfree(&found);
        }
        if (library) break;
    }
    if (!library) library = dlopen(file, RTLD_NOW | RTLD_GLOBAL);
    const char *error = dlerror(); // clears the error, so that later callers do not see it
    if (!library && !*why) snprintf(why, 200, "%s", error ? error : file);
    return library;
}

// Opens a library, or returns NULL. error: why it cannot be opened, and what to do
static void *library_open(const Library *which, char error[500]) {
    char why[200];
    void *library = library_file(which->file, why);
    if (!library)
        snprintf(error, 500, "%s (%s): install %s (pip: %s), or name its folder in STREAMBP_LIBRARIES", which->name,
                 why, which->package, which->wheel);
    return library;
}

// Looks up a function; ends the program if the library is too old to have it.
static void *library_function(void *library, const Library *which, const char *name) {
    void *function = dlsym(library, name);
    if (!function)
        die("%s: %s has no %s: install a later version (pip: %s)", which->name, which->file, name, which->wheel);
    return function;
}

#endif
