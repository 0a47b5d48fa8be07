/*
Prompts of shards, for rollouts (rollout.h): of documents that know where their prompt ends, of groups (one prompt
each), or of shards of prompts alone. Opened with DATA_PROMPTS; nothing is packed. What lies behind a prompt is the
reference answer, which is not trained on; the completions of a group are none. Nothing is allocated after opening.
*/
#ifndef LLMC_PROMPTS_H
#define LLMC_PROMPTS_H
#include "documents_read.h"

static size_t prompts_count(const Documents *d) { return d->prompts; }

// Tokens of the longest prompt, and of the longest prompt with what lies behind it, at most.
static size_t prompts_longest(const Documents *d) { return d->longest_prompt; }

static size_t prompts_longest_document(const Documents *d) {
    size_t longest = 0;
    for (size_t i = 0; i < d->shards; i++) longest = max_size(longest, (size_t)d->shard[i].header.longest);
    return d->shard[0].header.kind == KIND_GROUPS ? d->longest_prompt : longest;
}

// Of prompt number `prompt`: its ids and those of the reference answer, as many as there is room for. *prompt_tokens:
// of the prompt; *tokens: of both, which may be more than there is room for.
static void prompts_read(Documents *d, size_t prompt, int32_t *ids, size_t room, size_t *prompt_tokens,
                         size_t *tokens) {
    DocumentAt at = documents_find(d, d->prompt[prompt]);
    const TokenShard *s = &at.shard->header;
    size_t part;
    *prompt_tokens = (size_t)at.entry.prompt;
    *tokens = s->kind == KIND_GROUPS ? *prompt_tokens : (size_t)at.entry.tokens;
    documents_check_whole(d, &at);
    size_t n = min_size(*tokens, room);
    for (size_t done = 0; done < n; done += part) {
        part = min_size(n - done, DOCUMENTS_BUFFER_BYTES / s->id_bytes);
        input_read(at.file, s->ids + (at.entry.first + done) * s->id_bytes, d->buffer, part * s->id_bytes);
        for (size_t i = 0; i < part; i++) {
            uint32_t id = shard_id(s, d->buffer, i);
            if (id >= s->vocabulary) documents_refuse_id(&at, done + i, id);
            ids[done + i] = (int32_t)id;
        }
    }
}

#endif
