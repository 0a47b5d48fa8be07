/*
Writes, into the current folder, what llm.c's CPU trainer wants to read: gpt2_124M.bin with random weights (magic
20240326, version 3) and the token files it looks for (magic 20240520, version 1). For timing only.
*/
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static uint32_t state = 1;
static uint32_t next(void) {
    state ^= state << 13, state ^= state >> 17, state ^= state << 5;
    return state;
}

static FILE *create(const char *path) {
    FILE *file = fopen(path, "wb");
    if (!file) perror(path), exit(1);
    return file;
}

static void write_tokens(const char *path, int32_t count) {
    int32_t header[256] = {20240520, 1, count};
    FILE *file = create(path);
    fwrite(header, 4, 256, file);
    for (int32_t i = 0; i < count; i++) {
        uint16_t id = (uint16_t)(next() % 50257);
        fwrite(&id, 2, 1, file);
    }
    fclose(file);
}

int main(void) {
    int32_t header[256] = {20240326, 3, 1024, 50257, 12, 12, 768, 50304};
    // wte, wpe, and per layer: two norms, qkv, attention projection, MLP; the final norm
    size_t C = 768, L = 12, padded = 50304;
    size_t count = padded * C + 1024 * C + L * (4 * C + 3 * C * C + 3 * C + C * C + C + 8 * C * C + 5 * C) + 2 * C;
    FILE *file = create("gpt2_124M.bin");
    fwrite(header, 4, 256, file);
    for (size_t i = 0; i < count; i++) {
        float value = ((float)(next() % 2001) - 1000.0f) * 2e-5f;
        fwrite(&value, 4, 1, file);
    }
    fclose(file);
    write_tokens("dev/data/tinyshakespeare/tiny_shakespeare_train.bin", 65536);
    write_tokens("dev/data/tinyshakespeare/tiny_shakespeare_val.bin", 16384);
    return 0;
}
