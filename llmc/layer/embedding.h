/*
The embedding of a chunk: tokens and positions to x_0, by tables and an adapter; backward adds dx to their gradients.
*/
#ifndef LLMC_EMBEDDING_H
#define LLMC_EMBEDDING_H
#include "llmc/stream/modules.h"

// Computes x_0[c] from tokens and positions.
static void embedding_step(StreamBP *s, Chunk c, GroupWeights w) {
    Shapes d = shapes_of(s->model);
    size_t position = s->model->model_offset[POSITION_EMBEDDING];
    const Stored *wpe = position == ABSENT ? NULL : (const Stored *)at(w.weights, position, d.stored);
    s->ops->embedding_forward(layer_input(s, 0, c.row), s->now.tokens + c.row, s->now.position + c.row,
                              (const Stored *)w.weights, wpe, c.n, d.C, d.embedding_scale);
    embedding_adapter_forward(s, layer_input(s, 0, c.row), c.row, c.n, w);
    if (s->model->config.family->outer_norms)
        s->ops->norm_forward(layer_input(s, 0, c.row), layer_input(s, 0, c.row), NULL, NULL, NULL, c.n, d.C,
                             norm_of(s));
    input_save(s, 0, c);
}

// Turns dx of x_0, rows [row, row + n), into the gradient of the embeddings before their norm, a chunk at a time. Looks
// the embeddings up again. Collective: ranks gather the weights even with n = 0
static void embedding_norm_backward(StreamBP *s, size_t row, size_t n) {
    const size_t C = s->model->config.hidden_size, mark = arena_mark(s->arena), most = min_size(n, layer_chunk(s));
    const GroupWeights w = weights_acquire(&s->memory, GROUP_EMBEDDING);
    Stored *x = push_stored(s, SHARE_WORKSPACE, "embeddings before their norm", most * C);
    for (size_t done = 0, part; done < n; done += part) {
        Stored *dx = gradient_at(s, row + done);
        part = min_size(n - done, most);
        s->ops->embedding_forward(x, s->now.tokens + row + done, s->now.position + row + done,
                                  (const Stored *)w.weights, NULL, part, C, 1);
        embedding_adapter_forward(s, x, row + done, part, w);
        norm_rows_backward(s, dx, NULL, NULL, dx, x, NULL, part, C, 0);
    }
    arena_pop(s->arena, mark);
    weights_release(&s->memory, GROUP_EMBEDDING);
}

// dw[index[t],:] += scale dx[t,:] for t in [row, row + n). index: tokens or positions; dw [table_rows,C]. Does nothing
// for a table that is frozen or absent.
static void table_backward(const StreamBP *s, size_t row, size_t n, GroupSums dw, ModelTensor table,
                           const int32_t *index, size_t table_rows) {
    Shapes d = shapes_of(s->model);
    const size_t mark = arena_mark(s->arena), offset = s->model->model_offset[table];
    if (!dw.tables || !n || offset == ABSENT) return;
    void *sums = at(dw.tables, offset, dtype_size(dw.tables_type));
    Summed *scratch =
        push_summed(s, SHARE_WORKSPACE, "token order", s->ops->embedding_backward_scratch(n, table_rows, d.C));
    s->ops->embedding_backward(sums, dw.tables_type, gradient_at(s, row), index + row, n, table_rows, d.C,
                               table == EMBEDDING ? d.embedding_scale : 1,
                               table == EMBEDDING ? s->model->config.pad_token_id : NO_ROW, scratch);
    arena_pop(s->arena, mark);
}

// Adds dx of x_0, rows [row, row + n), to the gradients of the tables and of the embedding's adapter.
static void tables_backward(StreamBP *s, size_t row, size_t n, GroupSums dw) {
    Shapes d = shapes_of(s->model);
    const Lora *lora = s->memory.lora;
    if (s->model->config.family->outer_norms && (lora ? lora_trains_embedding(lora) : dw.tables != NULL))
        embedding_norm_backward(s, row, n);
    embedding_adapter_backward(s, gradient_at(s, row), row, n, dw);
    table_backward(s, row, n, dw, EMBEDDING, s->now.tokens, d.V);
    table_backward(s, row, n, dw, POSITION_EMBEDDING, s->now.position, s->model->config.max_position_embeddings);
}

#endif
