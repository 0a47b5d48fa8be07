// Adapters for tests of files and of steps
#ifndef TEST_LORA_CASES_H
#define TEST_LORA_CASES_H
#include "llmc/model/lora.h"

// Gives layers different adapters: ranks 0 to 3, with their own alphas.
static void lora_vary(Lora *lora, const Config *c) {
    lora->each = (LoraModule *)checked_calloc(c->num_hidden_layers * LORA_TENSORS, sizeof(LoraModule), "adapters");
    for (size_t l = 0; l < c->num_hidden_layers; l++)
        for (size_t i = 0; lora_module(c->family, i); i++) {
            LoraModule *m = &lora->each[l * LORA_TENSORS + i];
            if (lora->modules >> i & 1 && lora_layer_has(c, l, i)) m->rank = (l + i) % 4, m->alpha = (double)(i + 1);
        }
}

static void lora_give_outer(Lora *lora) {
    const LoraModule embedding = {2, 0.6}, head = {3, 2};
    lora->outer[EMBEDDING] = embedding, lora->outer[LM_HEAD] = head;
}

#endif
