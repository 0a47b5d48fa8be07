/*
The ops of struct Ops (ops.h), each with its contract: formula, shape of every pointer, what is written. This list is
included wherever every op is needed: the struct, the tables of op sets, op sets that wrap others.

    OP(type, name, (parameters), (arguments), touches)

`touches` is a row of statements, in macros that the including file may define:
    TENSOR(argument, elements, size)  device memory, or NULL; size: bytes of an element; STORED and SUMMED:
                                      bytes of the types in ops.h
    KEYS(argument, size)              device memory: the rows of k, v, dk or dv that attention's `shape` reads
    PLACE(argument, bytes)            memory of the device, or of another place
    COUNT(...)                        what op set "dry" also counts or checks (ops_dry.h)

Kinds of ops; each is an OP unless the including file defines a macro for it:
    OP_HOST     touches no device memory             OP_MEMORY  moves bytes: copies, transfers, between processes
    OP_SCRATCH  elements of scratch that an op needs   OP_STEP    belongs to an optimizer's step, not to a pass
    OP_GRAPH    an OP_HOST op that records launches
*/
#ifndef OPS // op set whose functions X_scratch size the scratch tensors
#define OPS ops_device
#endif
#ifndef OP_HOST
#define OP_HOST(type, name, parameters, arguments) OP(type, name, parameters, arguments, )
#endif
#ifndef OP_SCRATCH
#define OP_SCRATCH(name, parameters, arguments) OP(size_t, name, parameters, arguments, )
#endif
#ifndef OP_MEMORY
#define OP_MEMORY OP
#endif
#ifndef OP_STEP
#define OP_STEP OP
#endif
#ifndef OP_GRAPH
#define OP_GRAPH OP_HOST
#endif
// clang-format off

// ---- memory --------------------------------------------------------------------------------------------------------
// returns NULL if there is not enough memory; contents are undefined
OP_HOST(void *, allocate, (size_t bytes), (bytes))
OP_HOST(void, release, (void *memory, size_t bytes), (memory, bytes))
// returns NULL if the device can be used, else one sentence: why it cannot, and what to do
OP_HOST(const char *, device_problem, (void), ())
// peak bytes of all allocations of this process
OP_HOST(size_t, memory_peak, (void), ())
// name of the device, "NVIDIA H100 80GB HBM3"; "" for a CPU
OP_HOST(const char *, device_name, (void), ())
// bytes that could be allocated now; 0: unknown
OP_HOST(size_t, memory_available, (void), ())
// name of memory_available's figure: "the memory available"
OP_HOST(const char *, memory_name, (void), ())
// copies host memory to or from memory of any place. Before a copy, await transfers of these bytes
OP_MEMORY(void, copy_in, (void *place, const void *host, size_t bytes), (place, host, bytes), PLACE(place, bytes))
OP_MEMORY(void, copy_out, (void *host, const void *place, size_t bytes), (host, place, bytes), PLACE(place, bytes))
// copies device memory; no overlap
OP_MEMORY(void, copy, (void *out, const void *in, size_t bytes), (out, in, bytes),
          TENSOR(out, bytes, 1) TENSOR(in, bytes, 1))
OP_MEMORY(void, zero, (void *out, size_t bytes), (out, bytes), TENSOR(out, bytes, 1))
// reports on devices, driver, libraries and memory: what is wrong and what to do; never ends the program
OP_HOST(void, machine_findings, (TellFinding tell), (tell))
// returns when all work is done; call it before reading a clock
OP_HOST(void, finish, (void), ())

// ---- places to which tensors are stored during other ops: host memory and files on disk ----------------------------
// returns memory that the device reaches at full speed; NULL if there is not enough
OP_HOST(void *, host_allocate, (size_t bytes), (bytes))
OP_HOST(void, host_release, (void *memory, size_t bytes), (memory, bytes))
// bytes of host memory that could be allocated once the device has `planned` bytes; 0: unknown
OP_HOST(size_t, host_available, (size_t planned), (planned))
// Returns addresses for the bytes of a nameless file in `folder` and reserves its space. Transfers and copies take
// these addresses, and address arithmetic works; reading through them faults. Contents are undefined. Ends the program
// with one line if that fails: no folder, not writable, too small, host memory (tmpfs), a network file system
OP_HOST(void *, disk_allocate, (const char *folder, size_t bytes), (folder, bytes))
OP_HOST(void, disk_release, (void *memory, size_t bytes), (memory, bytes))
// bytes that this rank could allocate in `folder`; ends the program like disk_allocate
OP_HOST(size_t, disk_available, (const char *folder), (folder))
// A transfer runs in parallel with other ops until its ticket is awaited. Until then, write neither its source nor its
// target, and do not read its target. There are four kinds: stores to the host, loads from the host, stores to disk,
// loads from disk. A ticket is 4 * number + kind, with numbers from 1. Transfers of one kind are done in order, kinds
// in any order: await a store before asking for a load of what it writes. store: place = device
OP_MEMORY(int64_t, store, (void *place, const void *device, size_t bytes), (place, device, bytes),
          PLACE(place, bytes) TENSOR(device, bytes, 1))
// load: device = place
OP_MEMORY(int64_t, load, (void *device, const void *place, size_t bytes), (device, place, bytes),
          PLACE(place, bytes) TENSOR(device, bytes, 1))
// makes later ops wait until this transfer and all earlier transfers of the same kind are done; ticket 0: no transfer.
// A failed transfer ends the program here
OP_MEMORY(void, await_transfer, (int64_t ticket), (ticket), )
// returns 1 if ops can read memory of any place, on the device or not; 0: only transfers and copies can
OP_HOST(int, reaches, (const void *place, size_t bytes), (place, bytes))

// op set "dry" counts each of the following calls `factor` times; other op sets ignore it
OP_HOST(void, repeat, (double factor), (factor))

// ---- graphs: a decoding step is recorded once and launched again as a whole ----------------------------------------
//         for (int calls = ops->graph_begin(&key); calls; calls = ops->graph_end()) make the calls
// The calls neither copy to or from the host nor await anything. Op sets without graphs make them once.
// graph_begin returns 0 if it repeated the launches of an equal part, else 1
OP_GRAPH(int, graph_begin, (const GraphKey *key), (key))
// returns 1 if the calls were recorded but not launched: make them again
OP_GRAPH(int, graph_end, (void), ())
// call before memory or weights move
OP_GRAPH(void, graphs_forget, (void), ())

// ---- embedding -----------------------------------------------------------------------------------------------------
// out[n,C] = scale * wte[token] + wpe[position];  wpe NULL: positions are rotary
OP(void, embedding_forward, (Stored *out, const int32_t *tokens, const int32_t *position, const Stored *wte,
                             const Stored *wpe, size_t n, size_t C, double scale),
   (out, tokens, position, wte, wpe, n, C, scale),
   TENSOR(out, n * C, STORED) TENSOR(tokens, n, sizeof(int32_t)) TENSOR(position, n, sizeof(int32_t))
   TENSOR(wte, C, STORED) TENSOR(wpe, C, STORED) COUNT(dry_move(2 * n * C, STORED)))
// dw[rows,C] += scale * sum of dx[t] over the tokens t with index[t] == row, accumulated in Summed, added to dw once.
// Row `skip` gets nothing (NO_ROW: no row is skipped)
OP(void, embedding_backward, (void *dw, DType dw_type, const Stored *dx, const int32_t *index, size_t N, size_t rows,
                              size_t C, double scale, size_t skip, Summed *scratch),
   (dw, dw_type, dx, index, N, rows, C, scale, skip, scratch),
   TENSOR(dw, rows * C, dtype_size(dw_type)) TENSOR(dx, N * C, STORED) TENSOR(index, N, sizeof(int32_t))
   TENSOR(scratch, OPS->embedding_backward_scratch(N, rows, C), SUMMED))
OP_SCRATCH(embedding_backward_scratch, (size_t N, size_t rows, size_t C), (N, rows, C))

// ---- rows ----------------------------------------------------------------------------------------------------------
// out[row[i],:] = in[i,:] of in[n,width], i < n. The rows are distinct, and only the device knows them
OP(void, scatter_rows, (Stored *out, const Stored *in, const int32_t *row, size_t n, size_t width),
   (out, in, row, n, width),
   TENSOR(out, n ? width : 0, STORED) TENSOR(in, n * width, STORED) TENSOR(row, n, sizeof(int32_t))
   COUNT(dry_move(2 * n * width, STORED)))
// out[i,:] = in[row[i],:] of rows in[.,width], i < n; where row[i] is 0, out[i,:] stays. Only the device knows the
// rows. in: memory of any place that ops reach
OP(void, gather_rows, (Stored *out, const Stored *in, const int32_t *row, size_t n, size_t width),
   (out, in, row, n, width),
   TENSOR(out, n * width, STORED) PLACE(in, n ? width * STORED : 0) TENSOR(row, n, sizeof(int32_t))
   COUNT(dry_move(2 * n * width, STORED)))

// ---- weights in 4 bits ---------------------------------------------------------------------------------------------
// out[n] = the elements of a 4-bit matrix (llmc/base/quantise.h): quant_decode of its record, rounded to Stored
OP(void, dequantise, (Stored *out, const void *record, const QuantFormat *format, size_t n), (out, record, format, n),
   TENSOR(out, n, STORED) TENSOR(record, quant_parts(*format, n).bytes, 1)
   COUNT(dry_move(n * STORED + quant_parts(*format, n).bytes, 1)))

// ---- norms ---------------------------------------------------------------------------------------------------------
// out[n,C] = xhat * (w + offset) (+ b[C] or residual[n,C], not both; NULL: none). RMSNorm: xhat = x / sqrt(mean(x^2) +
// eps), w may be NULL: factor 1; LayerNorm: xhat = (x - mean) / sqrt(var + eps). out may be x or residual
OP(void, norm_forward, (Stored *out, const Stored *x, const Stored *w, const Stored *b, const Stored *residual,
                        size_t n, size_t C, Norm norm),
   (out, x, w, b, residual, n, C, norm),
   COUNT(dry_norm(norm, "rmsnorm_forward", "layernorm_forward", C))
   TENSOR(out, n * C, STORED) TENSOR(x, n * C, STORED) TENSOR(residual, n * C, STORED) TENSOR(w, C, STORED)
   TENSOR(b, C, STORED) COUNT(dry_move((residual ? 3 : 2) * n * C, STORED)))
// dx[n,C] = (or += with accumulate) gradient of x, dw[C] +=; LayerNorm: db[C] +=. dx may be dout or x when not
// accumulating. With dw and db NULL only dx is computed, and scratch may be NULL.
OP(void, norm_backward, (Stored *dx, Summed *dw, Summed *db, const Stored *dout, const Stored *x, const Stored *w,
                         size_t n, size_t C, Norm norm, int accumulate, Summed *scratch),
   (dx, dw, db, dout, x, w, n, C, norm, accumulate, scratch),
   COUNT(dry_norm(norm, "rmsnorm_backward", "layernorm_backward", C))
   TENSOR(dx, n * C, STORED) TENSOR(dw, C, SUMMED) TENSOR(db, C, SUMMED) TENSOR(dout, n * C, STORED)
   TENSOR(x, n * C, STORED) TENSOR(w, C, STORED) TENSOR(scratch, OPS->norm_backward_scratch(n, C), SUMMED)
   COUNT(dry_move((accumulate ? 4 : 3) * n * C, STORED)))
OP_SCRATCH(norm_backward_scratch, (size_t n, size_t C), (n, C))

// ---- linear: weight[OC,C], as in out = x weight^T + bias -----------------------------------------------------------
// Rows of out, residual and dout [n,OC] are `stride` >= OC elements apart: columns of a wider matrix that an adapter
// (LoRA) adds to, or padded logits. Gaps between rows are neither read nor written.
// out[n,OC] = x[n,C] weight^T (+ bias[OC]) (+ residual[n,OC]), rounded once;  bias, residual may be NULL; out may be
// residual
OP(void, linear_forward, (Stored *out, const Stored *x, const Stored *weight, const Stored *bias,
                          const Stored *residual, size_t n, size_t C, size_t OC, size_t stride),
   (out, x, weight, bias, residual, n, C, OC, stride),
   TENSOR(out, strided(n, OC, stride), STORED) TENSOR(x, n * C, STORED) TENSOR(weight, OC * C, STORED)
   TENSOR(bias, OC, STORED) TENSOR(residual, strided(n, OC, stride), STORED) COUNT(dry_product(n, C, OC, STORED)))
// linear_forward with weight = rows [first, first + OC) of the dequantised record of [rows,C], without decoding it to
// memory. Meant for few tokens
OP(void, linear_forward_quantised, (Stored *out, const Stored *x, const void *record, const QuantFormat *format,
                                    size_t rows, size_t first, const Stored *bias, const Stored *residual, size_t n,
                                    size_t C, size_t OC, size_t stride),
   (out, x, record, format, rows, first, bias, residual, n, C, OC, stride),
   TENSOR(out, strided(n, OC, stride), STORED) TENSOR(x, n * C, STORED)
   TENSOR(record, quant_parts(*format, rows * C).bytes, 1) TENSOR(bias, OC, STORED)
   TENSOR(residual, strided(n, OC, stride), STORED)
   COUNT(dry_product_of(n, C, OC, (double)quant_parts(*format, OC * C).bytes, 1)))
// dx[n,C] = (or += with accumulate) dout[n,OC] weight
OP(void, linear_backward_input, (Stored *dx, const Stored *dout, const Stored *weight, size_t n, size_t C, size_t OC,
                                 size_t stride, int accumulate),
   (dx, dout, weight, n, C, OC, stride, accumulate),
   TENSOR(dx, n * C, STORED) TENSOR(dout, strided(n, OC, stride), STORED) TENSOR(weight, OC * C, STORED)
   COUNT(dry_product(n, C, OC, STORED)))
// dweight[OC,C] += dout^T x, dbias[OC] += column sums of dout (dbias may be NULL)
OP(void, linear_backward_weight, (Summed *dweight, Summed *dbias, const Stored *dout, const Stored *x, size_t n,
                                  size_t C, size_t OC, size_t stride),
   (dweight, dbias, dout, x, n, C, OC, stride),
   TENSOR(dweight, OC * C, SUMMED) TENSOR(dbias, OC, SUMMED) TENSOR(dout, strided(n, OC, stride), STORED)
   TENSOR(x, n * C, STORED) COUNT(dry_product(n, C, OC, 2 * SUMMED)))

// ---- adapters (LoRA): their products are linear ops ----------------------------------------------------------------
// x[count] *= factor; type: the model's type or the type of sums
OP(void, scale, (void *x, DType type, double factor, size_t count), (x, type, factor, count),
   TENSOR(x, count, dtype_size(type)) COUNT(dry_move(2 * count, dtype_size(type))))
// out[n,width] = (or += with accumulate) in / (1 - rate) where dropout_keeps (random.h) element (first_row + row) *
// width + column of this seed, else 0; 0 <= rate < 1. out may be in when not accumulating. The op is its own backward.
OP(void, dropout, (Stored *out, const Stored *in, size_t n, size_t width, size_t first_row, double rate, uint64_t seed,
                   int accumulate),
   (out, in, n, width, first_row, rate, seed, accumulate),
   TENSOR(out, n * width, STORED) TENSOR(in, n * width, STORED)
   COUNT(dry_move((accumulate ? 3 : 2) * n * width, STORED)))

// ---- rotary position embedding, in place on the first R of x[n,heads,HD]: pairs turned by position * frequency[i] --
// Rotates pairs (i, i + R/2), or (2i, 2i + 1), scaled as `how` says (ops.h). back: rotates back, in the backward pass
OP(void, rope, (Stored *x, const int32_t *position, const float *inverse_frequency, size_t n, size_t heads, size_t HD,
                size_t R, Rotation how, int back),
   (x, position, inverse_frequency, n, heads, HD, R, how, back),
   COUNT(dry.op = back ? "rope_backward" : "rope_forward")
   TENSOR(x, n * heads * HD, STORED) TENSOR(position, n, sizeof(int32_t))
   TENSOR(inverse_frequency, R / 2, sizeof(float)) COUNT(dry_move(2 * n * heads * R, STORED)))

// ---- the gate of attention's output ---------------------------------------------------------------------------------
// Splits rows [heads, first HD | second HD] into first[n,heads,HD] and second[n,heads,HD]; join: joins them
OP(void, split_heads, (Stored *joined, Stored *first, Stored *second, size_t n, size_t heads, size_t HD, int join),
   (joined, first, second, n, heads, HD, join),
   TENSOR(joined, 2 * n * heads * HD, STORED) TENSOR(first, n * heads * HD, STORED)
   TENSOR(second, n * heads * HD, STORED) COUNT(dry_move(4 * n * heads * HD, STORED)))
// out[count] = x / (1 + exp(-gate[count / width])); a gate has `width` elements: 1, or those of a head. out may be x
OP(void, gate_forward, (Stored *out, const Stored *x, const Stored *gate, size_t count, size_t width),
   (out, x, gate, count, width),
   TENSOR(out, count, STORED) TENSOR(x, count, STORED) TENSOR(gate, count / width, STORED)
   COUNT(dry_move(2 * count + count / width, STORED)))
// dgate: a gate's sum over its elements. dx may be dout, dgate may be gate
OP(void, gate_backward, (Stored *dx, Stored *dgate, const Stored *dout, const Stored *x, const Stored *gate,
                         size_t count, size_t width),
   (dx, dgate, dout, x, gate, count, width),
   TENSOR(dx, count, STORED) TENSOR(dgate, count / width, STORED) TENSOR(dout, count, STORED)
   TENSOR(x, count, STORED) TENSOR(gate, count / width, STORED)
   COUNT(dry_move(3 * count + 2 * (count / width), STORED)))

// ---- latent attention: keys and values of a range of tokens -------------------------------------------------------
// Rows of kv[n,heads,(HD - R) + VD]: k[n,heads,HD] = the first HD - R elements, then shared[n,R] of the token, the same
// for all heads; v[n,heads,HD] = the rest, VD <= HD elements, then zeros
OP(void, latent_expand, (Stored *k, Stored *v, const Stored *kv, const Stored *shared, size_t n, size_t heads,
                         size_t HD, size_t VD, size_t R), (k, v, kv, shared, n, heads, HD, VD, R),
   TENSOR(k, n * heads * HD, STORED) TENSOR(v, n * heads * HD, STORED)
   TENSOR(kv, n * heads * (HD - R + VD), STORED) TENSOR(shared, n * R, STORED)
   COUNT(dry_move(4 * n * heads * HD, STORED)))
// its backward: dkv = dk, the first VD elements of dv, rounded; dshared[n,R] += the sum over heads
OP(void, latent_fold, (Stored *dkv, Summed *dshared, const Summed *dk, const Summed *dv, size_t n, size_t heads,
                       size_t HD, size_t VD, size_t R), (dkv, dshared, dk, dv, n, heads, HD, VD, R),
   TENSOR(dkv, n * heads * (HD - R + VD), STORED) TENSOR(dshared, n * R, SUMMED) TENSOR(dk, n * heads * HD, SUMMED)
   TENSOR(dv, n * heads * HD, SUMMED) COUNT(dry_move(2 * n * heads * HD, STORED + SUMMED)))
// narrow[n,heads,VD] = the first VD elements of each head of wide[n,heads,HD]; back: wide = narrow, then zeros
OP(void, latent_trim, (Stored *wide, Stored *narrow, size_t n, size_t heads, size_t HD, size_t VD, int back),
   (wide, narrow, n, heads, HD, VD, back),
   TENSOR(wide, n * heads * HD, STORED) TENSOR(narrow, n * heads * VD, STORED)
   COUNT(dry_move(n * heads * (VD + (back ? HD : VD)), STORED)))
// sums += in
OP(void, sums_add, (Summed *sums, const Stored *in, size_t count), (sums, in, count),
   TENSOR(sums, count, SUMMED) TENSOR(in, count, STORED) COUNT(dry_move(count, 2 * SUMMED + STORED)))

// ---- linear attention (Gated DeltaNet): struct DeltaShape, n = delta_rows, W = delta_channels -----------------------
// The tokens of a document's spans are the document's tokens, in order. A span that begins its document starts from a
// state of zeros, any other span from the stored state of its slot. The state after the span is stored in its slot.
// With slot_tokens 0 only the first span of a call may continue a document, and the state after the last span is
// stored. out[n,W] = silu(sum over j < taps of weight[W,taps][.,j] x[t - (taps - 1) + j]), x is 0 before a document;
// columns [slots,taps-1,W]: x of the last tokens before a span. Rows of x are shape->stride apart. With
// shape->gates a row of x is B | C | x: out = C (sum of weight (B x)), and columns hold B x, rounded. bias[W] is added
// to the sum, may be NULL
OP(void, conv_forward, (Stored *out, Stored *columns, const Stored *x, const Stored *weight, const Stored *bias,
                        const DeltaShape *shape),
   (out, columns, x, weight, bias, shape),
   TENSOR(out, delta_rows(shape) * delta_channels(shape), STORED)
   TENSOR(columns, delta_slots(shape) * (shape->taps - 1) * delta_channels(shape), STORED)
   TENSOR(x, strided(delta_rows(shape), conv_width(shape), shape->stride), STORED)
   TENSOR(weight, delta_channels(shape) * shape->taps, STORED) TENSOR(bias, delta_channels(shape), STORED)
   COUNT(dry_move(delta_rows(shape) * (delta_channels(shape) + conv_width(shape)), STORED)))
// dx (rows shape->stride apart) overwritten; dweight[W,taps], dbias[W] += (may be NULL). columns: as before forward.
// dcolumns [taps-1,W]: in, the gradients that later calls have for x of this call's last taps - 1 tokens, 0 if they
// belong to another document; if the call has fewer rows, the first ones are for tokens before the call. Out, the
// gradients for the taps - 1 tokens before this call, 0 if the first span begins its document. slot_tokens is 0. With
// gates dx has the gradients of B | C | x, and dcolumns are gradients of B x
OP(void, conv_backward, (Stored *dx, Summed *dweight, Summed *dbias, Summed *dcolumns, const Stored *dout,
                         const Stored *x, const Stored *columns, const Stored *weight, const Stored *bias,
                         const DeltaShape *shape, Summed *scratch),
   (dx, dweight, dbias, dcolumns, dout, x, columns, weight, bias, shape, scratch),
   TENSOR(dx, strided(delta_rows(shape), conv_width(shape), shape->stride), STORED)
   TENSOR(dweight, delta_channels(shape) * shape->taps, SUMMED) TENSOR(dbias, delta_channels(shape), SUMMED)
   TENSOR(dcolumns, (shape->taps - 1) * delta_channels(shape), SUMMED)
   TENSOR(dout, delta_rows(shape) * delta_channels(shape), STORED)
   TENSOR(x, strided(delta_rows(shape), conv_width(shape), shape->stride), STORED)
   TENSOR(columns, (shape->taps - 1) * delta_channels(shape), STORED)
   TENSOR(weight, delta_channels(shape) * shape->taps, STORED) TENSOR(bias, delta_channels(shape), STORED)
   TENSOR(scratch, OPS->conv_backward_scratch(shape, bias != NULL), SUMMED)
   COUNT(dry_move(2 * delta_rows(shape) * (delta_channels(shape) + conv_width(shape)), STORED)))
OP_SCRATCH(conv_backward_scratch, (const DeltaShape *shape, int biased), (shape, biased))

// The gated delta rule. x[n,W]: q, k, v after the convolution; b, a: rows of HV elements, shape->stride apart. Each
// head's q and k are divided by sqrt(sum of squares + 1e-6), q also by sqrt(K). With beta = 1 / (1 + exp(-b)), or twice
// that (doubled), and decay = exp(-exp(A_log) log(1 + exp(a + dt_bias))), at each token and value head
//         S = decay S;  S += k (beta (v - S^T k))^T;  out = S^T q
// state[slots,HV,K,V] = S, Summed; out[n,HV,V]; out NULL: only the state is computed. transfer[HV,K,K] (may be NULL;
// slot_tokens 0): becomes T transfer, with state after = T * state before + U; T is 0 if a document begins in the call
OP(void, delta_forward, (Stored *out, Summed *state, Summed *transfer, const Stored *x, const Stored *b,
                         const Stored *a, const Stored *A_log, const Stored *dt_bias, const DeltaShape *shape,
                         Summed *scratch),
   (out, state, transfer, x, b, a, A_log, dt_bias, shape, scratch),
   TENSOR(out, delta_rows(shape) * shape->HV * shape->V, STORED)
   TENSOR(state, delta_slots(shape) * delta_state_elements(shape), SUMMED)
   TENSOR(transfer, delta_transfer_elements(shape), SUMMED)
   TENSOR(x, delta_rows(shape) * delta_channels(shape), STORED)
   TENSOR(b, strided(delta_rows(shape), shape->HV, shape->stride), STORED)
   TENSOR(a, strided(delta_rows(shape), shape->HV, shape->stride), STORED)
   TENSOR(A_log, shape->HV, STORED) TENSOR(dt_bias, shape->HV, STORED)
   TENSOR(scratch, OPS->delta_forward_scratch(shape), SUMMED)
   COUNT(dry_delta(shape, out ? DELTA_FORWARD : DELTA_STATE, transfer != NULL)))
// dstate[HV,K,V]: in, the gradient of the state after the call; out, of the state before it, 0 if the first span begins
// its document. dx[n,W], db, da (rows shape->stride apart) overwritten, dA_log[HV], ddt_bias[HV] += (may be NULL).
// state: before the call, only read. With dx NULL only dstate is computed; db, da, dA_log, ddt_bias and state are then
// NULL, too. slot_tokens is 0
OP(void, delta_backward, (Stored *dx, Stored *db, Stored *da, Summed *dA_log, Summed *ddt_bias, Summed *dstate,
                          const Stored *dout, const Stored *x, const Stored *b, const Stored *a, const Stored *A_log,
                          const Stored *dt_bias, const Summed *state, const DeltaShape *shape, Summed *scratch),
   (dx, db, da, dA_log, ddt_bias, dstate, dout, x, b, a, A_log, dt_bias, state, shape, scratch),
   TENSOR(dx, delta_rows(shape) * delta_channels(shape), STORED)
   TENSOR(db, strided(delta_rows(shape), shape->HV, shape->stride), STORED)
   TENSOR(da, strided(delta_rows(shape), shape->HV, shape->stride), STORED)
   TENSOR(dA_log, shape->HV, SUMMED) TENSOR(ddt_bias, shape->HV, SUMMED)
   TENSOR(dstate, delta_state_elements(shape), SUMMED)
   TENSOR(dout, delta_rows(shape) * shape->HV * shape->V, STORED)
   TENSOR(x, delta_rows(shape) * delta_channels(shape), STORED)
   TENSOR(b, strided(delta_rows(shape), shape->HV, shape->stride), STORED)
   TENSOR(a, strided(delta_rows(shape), shape->HV, shape->stride), STORED)
   TENSOR(A_log, shape->HV, STORED) TENSOR(dt_bias, shape->HV, STORED)
   TENSOR(state, delta_state_elements(shape), SUMMED)
   TENSOR(scratch, OPS->delta_backward_scratch(shape), SUMMED)
   COUNT(dry_delta(shape, dx ? DELTA_BACKWARD : DELTA_STATE_BACKWARD, 0)))
// never decreases with more rows: plans rely on it
OP_SCRATCH(delta_forward_scratch, (const DeltaShape *shape), (shape))
OP_SCRATCH(delta_backward_scratch, (const DeltaShape *shape), (shape))

// Mamba-2's rule (shape->ssd). x[n,W]: v[HV,V], k[HK,K], q[HK,K] after the convolution; dt: rows of HV elements,
// shape->stride apart. With step = min(max(log(1 + exp(dt + dt_bias)), shape->least), shape->most) and decay =
// exp(-exp(A_log) step), at each token and value head
//         S = decay S + k (step v)^T;  out = S^T q + D v
// state, transfer and NULL as in delta_forward, but a head's T is one number: transfer[HV]. A_log, D, dt_bias [HV]
OP(void, ssd_forward, (Stored *out, Summed *state, Summed *transfer, const Stored *x, const Stored *dt,
                       const Stored *A_log, const Stored *D, const Stored *dt_bias, const DeltaShape *shape,
                       Summed *scratch),
   (out, state, transfer, x, dt, A_log, D, dt_bias, shape, scratch),
   TENSOR(out, delta_rows(shape) * shape->HV * shape->V, STORED)
   TENSOR(state, delta_slots(shape) * delta_state_elements(shape), SUMMED)
   TENSOR(transfer, delta_transfer_elements(shape), SUMMED)
   TENSOR(x, delta_rows(shape) * delta_channels(shape), STORED)
   TENSOR(dt, strided(delta_rows(shape), shape->HV, shape->stride), STORED)
   TENSOR(A_log, shape->HV, STORED) TENSOR(D, shape->HV, STORED) TENSOR(dt_bias, shape->HV, STORED)
   TENSOR(scratch, OPS->ssd_forward_scratch(shape), SUMMED)
   COUNT(dry_delta(shape, out ? DELTA_FORWARD : DELTA_STATE, transfer != NULL)))
// As delta_backward: dstate in and out, dx[n,W] and ddt (rows shape->stride apart) overwritten, dA_log, dD, ddt_bias +=
// (may be NULL). A step at a bound passes no gradient to dt. With dx NULL only dstate is computed; ddt, dA_log, dD,
// ddt_bias and state are then NULL, too
OP(void, ssd_backward, (Stored *dx, Stored *ddt, Summed *dA_log, Summed *dD, Summed *ddt_bias, Summed *dstate,
                        const Stored *dout, const Stored *x, const Stored *dt, const Stored *A_log, const Stored *D,
                        const Stored *dt_bias, const Summed *state, const DeltaShape *shape, Summed *scratch),
   (dx, ddt, dA_log, dD, ddt_bias, dstate, dout, x, dt, A_log, D, dt_bias, state, shape, scratch),
   TENSOR(dx, delta_rows(shape) * delta_channels(shape), STORED)
   TENSOR(ddt, strided(delta_rows(shape), shape->HV, shape->stride), STORED)
   TENSOR(dA_log, shape->HV, SUMMED) TENSOR(dD, shape->HV, SUMMED) TENSOR(ddt_bias, shape->HV, SUMMED)
   TENSOR(dstate, delta_state_elements(shape), SUMMED)
   TENSOR(dout, delta_rows(shape) * shape->HV * shape->V, STORED)
   TENSOR(x, delta_rows(shape) * delta_channels(shape), STORED)
   TENSOR(dt, strided(delta_rows(shape), shape->HV, shape->stride), STORED)
   TENSOR(A_log, shape->HV, STORED) TENSOR(D, shape->HV, STORED) TENSOR(dt_bias, shape->HV, STORED)
   TENSOR(state, delta_state_elements(shape), SUMMED)
   TENSOR(scratch, OPS->ssd_backward_scratch(shape), SUMMED)
   COUNT(dry_delta(shape, dx ? DELTA_BACKWARD : DELTA_STATE_BACKWARD, 0)))
// never decreases with more rows
OP_SCRATCH(ssd_forward_scratch, (const DeltaShape *shape), (shape))
OP_SCRATCH(ssd_backward_scratch, (const DeltaShape *shape), (shape))

// transfer[HV,K,K] = identity matrices, or with shape->ssd transfer[HV] = 1; delta_forward or ssd_forward turns them
// into the transfer of a range of tokens
OP(void, transfer_begin, (Summed *transfer, const DeltaShape *shape), (transfer, shape),
   TENSOR(transfer, delta_transfer_elements(shape), SUMMED) COUNT(dry_move(delta_transfer_elements(shape), SUMMED)))
// state[HV,K,V] += T before[HV,K,V], with each head's T = transfer[K,K]. state: in, the state after a range that began
// at zeros; out, after the range began at `before`. back: uses T^T, which takes gradients from a range's end to its
// start. With shape->ssd T is transfer[head]. Spans and slots are ignored
OP(void, state_combine, (Summed *state, const Summed *transfer, const Summed *before, int back,
                         const DeltaShape *shape),
   (state, transfer, before, back, shape),
   TENSOR(state, delta_state_elements(shape), SUMMED) TENSOR(transfer, delta_transfer_elements(shape), SUMMED)
   TENSOR(before, delta_state_elements(shape), SUMMED) COUNT(dry_combine(shape)))

// out[n,heads,V] = w[V] xhat silu(z), xhat = x / sqrt(mean(x^2) + eps) of each head; rows of z are stride apart. out
// may be x. gate_first (Mamba-2): out = w[heads,V] xhat with xhat of x silu(z)
OP(void, gated_norm_forward, (Stored *out, const Stored *x, const Stored *z, const Stored *w, size_t n, size_t heads,
                              size_t V, size_t stride, int gate_first, double eps),
   (out, x, z, w, n, heads, V, stride, gate_first, eps),
   TENSOR(out, n * heads * V, STORED) TENSOR(x, n * heads * V, STORED) TENSOR(z, strided(n, heads * V, stride), STORED)
   TENSOR(w, gate_first ? heads * V : V, STORED) COUNT(dry_move(3 * n * heads * V, STORED)))
// dx may be dout; dz: rows stride apart, NULL: not computed; dw += (may be NULL), of the size of w
OP(void, gated_norm_backward, (Stored *dx, Stored *dz, Summed *dw, const Stored *dout, const Stored *x, const Stored *z,
                               const Stored *w, size_t n, size_t heads, size_t V, size_t stride, int gate_first,
                               double eps, Summed *scratch),
   (dx, dz, dw, dout, x, z, w, n, heads, V, stride, gate_first, eps, scratch),
   TENSOR(dx, n * heads * V, STORED) TENSOR(dz, strided(n, heads * V, stride), STORED)
   TENSOR(dw, gate_first ? heads * V : V, SUMMED)
   TENSOR(dout, n * heads * V, STORED) TENSOR(x, n * heads * V, STORED) TENSOR(z, strided(n, heads * V, stride), STORED)
   TENSOR(w, gate_first ? heads * V : V, STORED)
   TENSOR(scratch, OPS->gated_norm_backward_scratch(n, heads, V, gate_first), SUMMED)
   COUNT(dry_move(5 * n * heads * V, STORED)))
OP_SCRATCH(gated_norm_backward_scratch, (size_t n, size_t heads, size_t V, int gate_first), (n, heads, V, gate_first))

// ---- attention of one chunk's queries over their documents' keys ---------------------------------------------------
// q, out [n,NH,HD] and lse [n,NH], n = spans_rows(spans); k, v [.,NKV,HD] start at token 0 of the sequence. out =
// softmax(scale q k^T) v, causal within the document, at most spans.window keys; lse = log sum exp of the scaled
// scores. Keys that no query sees are not read, with one exception: with a window, forward may read earlier keys of a
// span's document. Such a key gets no weight, but must be finite. With shape->partial a call takes one range of keys,
// in any order (ring attention, arXiv 2310.01889): out and lse are those of this range; accumulate: of this range
// merged with what they hold. Rows of k, v outside the range are not read and need not be memory. A query may see no
// key of the range; spans.pairs counts the range's pairs. Before a row has seen a key, out of the row is 0 and lse
// -infinity. out: Stored, partial: Summed
OP(void, attention_forward, (void *out, Summed *lse, const Stored *q, const Stored *k, const Stored *v,
                             const AttentionShape *shape, Summed *scratch),
   (out, lse, q, k, v, shape, scratch),
   COUNT(dry_attention(shape, 0)) TENSOR(out, attention_rows(shape) * shape->HD, shape->partial ? SUMMED : STORED)
   TENSOR(lse, attention_rows(shape), SUMMED) TENSOR(q, attention_rows(shape) * shape->HD, STORED)
   TENSOR(scratch, OPS->attention_scratch(spans_rows(shape->spans), shape->NH, shape->NKV, shape->HD, shape->slots),
          SUMMED)
   KEYS(k, STORED) KEYS(v, STORED))
// dq[n,NH,HD] = (or += with accumulate); dk, dv[.,NKV,HD] += for the keys that a query of the spans sees. out and lse
// belong to all ranges together. dq: Stored, partial: Summed
OP(void, attention_backward, (void *dq, Summed *dk, Summed *dv, const Stored *dout, const Stored *out, const Stored *q,
                              const Stored *k, const Stored *v, const Summed *lse, const AttentionShape *shape,
                              Summed *scratch),
   (dq, dk, dv, dout, out, q, k, v, lse, shape, scratch),
   COUNT(dry_attention(shape, 1)) TENSOR(dq, attention_rows(shape) * shape->HD, shape->partial ? SUMMED : STORED)
   TENSOR(lse, attention_rows(shape), SUMMED) TENSOR(dout, attention_rows(shape) * shape->HD, STORED)
   TENSOR(out, attention_rows(shape) * shape->HD, STORED) TENSOR(q, attention_rows(shape) * shape->HD, STORED)
   TENSOR(scratch, OPS->attention_scratch(spans_rows(shape->spans), shape->NH, shape->NKV, shape->HD, shape->slots),
          SUMMED)
   KEYS(k, STORED) KEYS(v, STORED) KEYS(dk, SUMMED) KEYS(dv, SUMMED))
// enough for forward and backward; never decreases with n: plans rely on it
OP_SCRATCH(attention_scratch, (size_t n, size_t NH, size_t NKV, size_t HD, TextSlots slots), (n, NH, NKV, HD, slots))
// sets how later calls and attention_scratch work; call it before planning. An op set may ignore it
OP_HOST(void, attention_choose, (AttentionChoice choice), (choice))
// name and version of the library that computes attention with these heads ("cuDNN 9.19.0"); NULL: our own kernels
// compute it
OP_HOST(const char *, attention_library, (size_t NH, size_t NKV, size_t HD, size_t window, int backward),
        (NH, NKV, HD, window, backward))

// received[keys] += sum over the n queries and their heads of exp(scale q k - lse): the attention that each key
// receives. lse[n,NH]: of attention over these keys and possibly over more keys; query t sees the first keys - n + t +
// 1 keys
OP(void, attention_received, (Summed *received, const Stored *q, const Stored *k, const Summed *lse, size_t n,
                              size_t keys, size_t NH, size_t NKV, size_t HD, double scale, Summed *scratch),
   (received, q, k, lse, n, keys, NH, NKV, HD, scale, scratch),
   TENSOR(received, keys, SUMMED) TENSOR(q, n * NH * HD, STORED) TENSOR(k, keys * NKV * HD, STORED)
   TENSOR(lse, n * NH, SUMMED) TENSOR(scratch, OPS->attention_received_scratch(keys, NKV), SUMMED)
   COUNT(dry_received(n, keys, NH, NKV, HD)))
OP_SCRATCH(attention_received_scratch, (size_t keys, size_t NKV), (keys, NKV))
// Chooses the `slots` best of blocks 1 .. blocks, by score[block - 1]. Of equal scores the earlier block is better; NaN
// counts as -infinity; score NULL: all are equal. slots <= blocks. slot[slots]: in, the block in each slot, or 0; no
// block is there twice. Out: a slot with a chosen block keeps it. All other slots take the remaining chosen blocks, in
// rising order. taken[slots]: the block that a slot takes; 0: the slot keeps its block
OP(void, blocks_choose, (int32_t *slot, int32_t *taken, const Summed *score, size_t blocks, size_t slots,
                         Summed *scratch),
   (slot, taken, score, blocks, slots, scratch),
   TENSOR(slot, slots, sizeof(int32_t)) TENSOR(taken, slots, sizeof(int32_t)) TENSOR(score, blocks, SUMMED)
   TENSOR(scratch, OPS->blocks_choose_scratch(slots), SUMMED) COUNT(dry_move(blocks, SUMMED)))
OP_SCRATCH(blocks_choose_scratch, (size_t slots), (slots))

// Sinks: each head's softmax has one more term, exp(sinks[h]), which reads no value. With l = lse[n,NH] of attention
// without the sink: lse = log(exp(l) + exp(sinks[h])), out[n,NH,HD] *= exp(l - lse). attention_backward takes the new
// out and lse as usual
OP(void, sink_forward, (Stored *out, Summed *lse, const Stored *sinks, size_t n, size_t NH, size_t HD),
   (out, lse, sinks, n, NH, HD),
   TENSOR(out, n * NH * HD, STORED) TENSOR(lse, n * NH, SUMMED) TENSOR(sinks, NH, STORED)
   COUNT(dry_move(2 * n * NH * HD, STORED)))
// dsinks[NH] -= sum over the n rows of exp(sinks[h] - lse) (dout . out); out and lse: as sink_forward left them
OP(void, sink_backward, (Summed *dsinks, const Stored *dout, const Stored *out, const Summed *lse, const Stored *sinks,
                         size_t n, size_t NH, size_t HD, Summed *scratch),
   (dsinks, dout, out, lse, sinks, n, NH, HD, scratch),
   TENSOR(dsinks, NH, SUMMED) TENSOR(dout, n * NH * HD, STORED) TENSOR(out, n * NH * HD, STORED)
   TENSOR(lse, n * NH, SUMMED) TENSOR(sinks, NH, STORED) TENSOR(scratch, OPS->sink_backward_scratch(n, NH), SUMMED)
   COUNT(dry_move(2 * n * NH * HD, STORED)))
OP_SCRATCH(sink_backward_scratch, (size_t n, size_t NH), (n, NH))

// ---- activations ---------------------------------------------------------------------------------------------------
// out[n,FF] of in[n,2FF] with rows [gate, up]. CLAMPED: gate and up alternate; GELU: of in[n,FF]
OP(void, activation_forward, (Stored *out, const Stored *in, Activation activation, size_t n, size_t FF),
   (out, in, activation, n, FF), COUNT(dry_activation(activation, 0))
   TENSOR(out, n * FF, STORED) TENSOR(in, n * activation_width(activation.kind, FF), STORED)
   COUNT(dry_move(n * (FF + activation_width(activation.kind, FF)), STORED)))
// din may be in
OP(void, activation_backward, (Stored *din, const Stored *dout, const Stored *in, Activation activation, size_t n,
                               size_t FF),
   (din, dout, in, activation, n, FF), COUNT(dry_activation(activation, 1))
   TENSOR(din, n * activation_width(activation.kind, FF), STORED) TENSOR(dout, n * FF, STORED)
   TENSOR(in, n * activation_width(activation.kind, FF), STORED)
   COUNT(dry_move(n * (FF + 2 * activation_width(activation.kind, FF)), STORED)))

// ---- experts: struct RouterShape, R = n k rows of (token, slot) -----------------------------------------------------
// logits[n,E] = (or += with accumulate) x[n,C] weight[E,C]^T (+ bias[E], may be NULL), in Summed
OP(void, router_logits, (Summed *logits, const Stored *x, const Stored *weight, const Stored *bias, size_t n, size_t C,
                         size_t E, int accumulate),
   (logits, x, weight, bias, n, C, E, accumulate),
   TENSOR(logits, n * E, SUMMED) TENSOR(x, n * C, STORED) TENSOR(weight, E * C, STORED) TENSOR(bias, E, STORED)
   COUNT(dry_product(n, C, E, STORED)))
// route[n,k]: each token's experts, by falling score, equal scores by rising index; NaN counts as the lowest score.
// bias[E] (may be NULL) is added to the scores for the choice. keep: routes whose first entry is not NO_EXPERT do not
// change
OP(void, router_choose, (uint16_t *route, const Summed *logits, const float *bias, size_t n, const RouterShape *shape,
                         int keep),
   (route, logits, bias, n, shape, keep),
   TENSOR(route, n * shape->k, sizeof(uint16_t)) TENSOR(logits, n * shape->E, SUMMED)
   TENSOR(bias, shape->E, sizeof(float)) COUNT(dry_move(n * shape->E, SUMMED)))
// weight[n,k] of each token's experts, from its logits. route NULL: all experts in order, k = E
OP(void, router_weights, (Summed *weight, const Summed *logits, const uint16_t *route, size_t n,
                          const RouterShape *shape),
   (weight, logits, route, n, shape),
   TENSOR(weight, n * shape->k, SUMMED) TENSOR(logits, n * shape->E, SUMMED)
   TENSOR(route, n * shape->k, sizeof(uint16_t)) COUNT(dry_move(n * (shape->E + shape->k), SUMMED)))
// dlogits[n,E] = the gradient through the weights, dweight[n,k], and through two losses. With p = softmax(z) of a token
// these add p_e (balance_e - sum_j p_j balance_j) for balance[E] (may be NULL), and 2 z log(sum_j exp z_j) p_e for the
// factor z, each times[n] times (NULL: once)
OP(void, router_backward, (Stored *dlogits, const Summed *dweight, const Summed *logits, const uint16_t *route,
                           const Summed *balance, double z, const int32_t *times, size_t n, const RouterShape *shape),
   (dlogits, dweight, logits, route, balance, z, times, n, shape),
   TENSOR(dlogits, n * shape->E, STORED) TENSOR(dweight, n * shape->k, SUMMED) TENSOR(logits, n * shape->E, SUMMED)
   TENSOR(route, n * shape->k, sizeof(uint16_t)) TENSOR(balance, shape->E, SUMMED)
   TENSOR(times, n, sizeof(int32_t)) COUNT(dry_move(2 * n * shape->E, SUMMED)))
// count[E] += rows of each expert. sums[e] += the tokens' softmax(z) of expert e; sums[E] += the tokens' (log(sum_j exp
// z_j))^2; sums may be NULL. A token counts times[n] times (NULL: once)
OP(void, router_count, (int64_t *count, double *sums, const Summed *logits, const uint16_t *route,
                        const int32_t *times, size_t n, const RouterShape *shape, Summed *scratch),
   (count, sums, logits, route, times, n, shape, scratch),
   TENSOR(count, shape->E, sizeof(int64_t)) TENSOR(sums, shape->E + 1, sizeof(double))
   TENSOR(logits, n * shape->E, SUMMED) TENSOR(route, n * shape->k, sizeof(uint16_t)) TENSOR(times, n, sizeof(int32_t))
   TENSOR(scratch, OPS->router_count_scratch(n, shape->E), SUMMED) COUNT(dry_move(n * shape->E, SUMMED)))
OP_SCRATCH(router_count_scratch, (size_t n, size_t E), (n, E))
// Sorts rows by expert, then by token: rows first[e] .. first[e + 1] belong to expert e, first[E + 1]. source[R]: token
// * k + slot of a sorted row; place[n,k]: the sorted row of a token's slot
OP(void, route_sort, (int32_t *first, int32_t *source, int32_t *place, const uint16_t *route, size_t n, size_t k,
                      size_t E, Summed *scratch),
   (first, source, place, route, n, k, E, scratch),
   TENSOR(first, E + 1, sizeof(int32_t)) TENSOR(source, n * k, sizeof(int32_t)) TENSOR(place, n * k, sizeof(int32_t))
   TENSOR(route, n * k, sizeof(uint16_t)) TENSOR(scratch, OPS->route_sort_scratch(n, k, E), SUMMED)
   COUNT(dry_move(3 * n * k, sizeof(int32_t))))
OP_SCRATCH(route_sort_scratch, (size_t n, size_t k, size_t E), (n, k, E))
// out[R,width] = x[n,width] of the sorted rows' tokens
OP(void, route_gather, (Stored *out, const Stored *x, const int32_t *source, size_t n, size_t k, size_t width),
   (out, x, source, n, k, width),
   TENSOR(out, n * k * width, STORED) TENSOR(x, n * width, STORED) TENSOR(source, n * k, sizeof(int32_t))
   COUNT(dry_move(2 * n * k * width, STORED)))
// out[n,width] = (residual[n,width] +) the sum over a token's slots, in their order, of rows[R,width]; residual may be
// NULL or out
OP(void, route_combine, (Stored *out, const Stored *rows, const int32_t *place, const Stored *residual, size_t n,
                         size_t k, size_t width),
   (out, rows, place, residual, n, k, width),
   TENSOR(out, n * width, STORED) TENSOR(rows, n * k * width, STORED) TENSOR(place, n * k, sizeof(int32_t))
   TENSOR(residual, n * width, STORED) COUNT(dry_move(n * (k + 2) * width, STORED)))
// out[i,width] = weight[source[i]] x[i,width] for rows i; source NULL: weight[i]. out may be x
OP(void, route_weigh, (Stored *out, const Stored *x, const Summed *weight, const int32_t *source, size_t rows,
                       size_t width),
   (out, x, weight, source, rows, width),
   TENSOR(out, rows * width, STORED) TENSOR(x, rows * width, STORED) TENSOR(weight, rows, SUMMED)
   TENSOR(source, rows, sizeof(int32_t)) COUNT(dry_move(2 * rows * width, STORED)))
// dweight[source[i]] = dout[i] x[i]; dx[i] = weight[source[i]] dout[i], may be dout; x[i] becomes weight[source[i]]
// x[i]
OP(void, route_weigh_backward, (Summed *dweight, Stored *dx, Stored *x, const Stored *dout, const Summed *weight,
                                const int32_t *source, size_t rows, size_t width),
   (dweight, dx, x, dout, weight, source, rows, width),
   TENSOR(dweight, rows, SUMMED) TENSOR(dx, rows * width, STORED) TENSOR(x, rows * width, STORED)
   TENSOR(dout, rows * width, STORED) TENSOR(weight, rows, SUMMED) TENSOR(source, rows, sizeof(int32_t))
   COUNT(dry_move(4 * rows * width, STORED)))
// Sorted rows r with the vector or factor of their expert e; token slots i = source[r]. rows[R,width] += weight[i]
// bias[E,width][e]; weight[n,k] NULL: factor 1
OP(void, experts_bias_forward, (Stored *rows, const Stored *bias, const Summed *weight, const int32_t *first,
                                const int32_t *source, size_t R, size_t E, size_t width),
   (rows, bias, weight, first, source, R, E, width),
   TENSOR(rows, R * width, STORED) TENSOR(bias, E * width, STORED) TENSOR(weight, R, SUMMED)
   TENSOR(first, E + 1, sizeof(int32_t)) TENSOR(source, R, sizeof(int32_t)) COUNT(dry_move(2 * R * width, STORED)))
// dbias[E,width] += (may be NULL); with weight: dweight[n,k] += drows[r] bias[e] (else weight and dweight are NULL)
OP(void, experts_bias_backward, (Summed *dbias, Summed *dweight, const Stored *drows, const Stored *bias,
                                 const Summed *weight, const int32_t *first, const int32_t *source, size_t R, size_t E,
                                 size_t width),
   (dbias, dweight, drows, bias, weight, first, source, R, E, width),
   TENSOR(dbias, E * width, SUMMED) TENSOR(dweight, R, SUMMED) TENSOR(drows, R * width, STORED)
   TENSOR(bias, E * width, STORED) TENSOR(weight, R, SUMMED) TENSOR(first, E + 1, sizeof(int32_t))
   TENSOR(source, R, sizeof(int32_t)) COUNT(dry_move(R * width, STORED)))
// out[n,k] = scale[e] weight[n,k], e: the expert of route (n,k); scale[E]; out may be weight
OP(void, experts_scale_forward, (Summed *out, const Summed *weight, const Stored *scale, const int32_t *first,
                                 const int32_t *source, size_t R, size_t E),
   (out, weight, scale, first, source, R, E),
   TENSOR(out, R, SUMMED) TENSOR(weight, R, SUMMED) TENSOR(scale, E, STORED) TENSOR(first, E + 1, sizeof(int32_t))
   TENSOR(source, R, sizeof(int32_t)) COUNT(dry_move(2 * R, SUMMED)))
// dscale[E] += (may be NULL); dweight[n,k]: in, the gradient of out; out, the gradient of weight
OP(void, experts_scale_backward, (Summed *dscale, Summed *dweight, const Summed *weight, const Stored *scale,
                                  const int32_t *first, const int32_t *source, size_t R, size_t E),
   (dscale, dweight, weight, scale, first, source, R, E),
   TENSOR(dscale, E, SUMMED) TENSOR(dweight, R, SUMMED) TENSOR(weight, R, SUMMED) TENSOR(scale, E, STORED)
   TENSOR(first, E + 1, sizeof(int32_t)) TENSOR(source, R, sizeof(int32_t)) COUNT(dry_move(3 * R, SUMMED)))
// Products of sorted rows with their expert's matrix, weight[E,OC,C]; first[E + 1], first[E] = rows.
// out[rows,OC] = (or += with accumulate) x[rows,C] weight[e]^T
OP(void, experts_forward, (Stored *out, const Stored *x, const Stored *weight, const int32_t *first, size_t rows,
                           size_t E, size_t C, size_t OC, int accumulate),
   (out, x, weight, first, rows, E, C, OC, accumulate),
   TENSOR(out, rows * OC, STORED) TENSOR(x, rows * C, STORED) TENSOR(weight, E * OC * C, STORED)
   TENSOR(first, E + 1, sizeof(int32_t)) COUNT(dry_experts(rows, E, C, OC, (double)dry.stored)))
// experts_forward, with bias[E,H] (may be NULL) experts_bias_forward, activation_forward and, with factor[n,k] (may be
// NULL), route_weigh in one, with the same bits: gate_up[rows,H] = x[rows,C] weight[E,H,C][e]^T + bias[e],
// H = activation_width(I), out[rows,I] = factor act(gate_up). keep 0: contents of gate_up do not matter afterwards
OP(void, experts_activate, (Stored *out, Stored *gate_up, const Stored *x, const Stored *weight, const Stored *bias,
                            const Summed *factor, const int32_t *first, const int32_t *source, size_t rows, size_t E,
                            size_t C, size_t I, Activation activation, int keep),
   (out, gate_up, x, weight, bias, factor, first, source, rows, E, C, I, activation, keep),
   TENSOR(out, rows * I, STORED) TENSOR(gate_up, rows * activation_width(activation.kind, I), STORED)
   TENSOR(x, rows * C, STORED) TENSOR(weight, E * activation_width(activation.kind, I) * C, STORED)
   TENSOR(bias, E * activation_width(activation.kind, I), STORED)
   TENSOR(factor, rows, SUMMED) TENSOR(first, E + 1, sizeof(int32_t)) TENSOR(source, rows, sizeof(int32_t))
   COUNT(dry_activated(rows, E, C, I, activation, bias != NULL, factor != NULL, keep)))
// experts_forward with weight = the dequantised record of [E * OC,C]. Records of experts without rows are not read.
// Meant for few tokens
OP(void, experts_forward_quantised, (Stored *out, const Stored *x, const void *record, const QuantFormat *format,
                                     const int32_t *first, size_t rows, size_t E, size_t C, size_t OC),
   (out, x, record, format, first, rows, E, C, OC),
   TENSOR(out, rows * OC, STORED) TENSOR(x, rows * C, STORED) TENSOR(record, quant_parts(*format, E * OC * C).bytes, 1)
   TENSOR(first, E + 1, sizeof(int32_t)) COUNT(dry_experts(rows, E, C, OC, 0.5)))
// dx[rows,C] = (or += with accumulate) dout[rows,OC] weight[e]
OP(void, experts_backward_input, (Stored *dx, const Stored *dout, const Stored *weight, const int32_t *first,
                                  size_t rows, size_t E, size_t C, size_t OC, int accumulate),
   (dx, dout, weight, first, rows, E, C, OC, accumulate),
   TENSOR(dx, rows * C, STORED) TENSOR(dout, rows * OC, STORED) TENSOR(weight, E * OC * C, STORED)
   TENSOR(first, E + 1, sizeof(int32_t)) COUNT(dry_experts(rows, E, C, OC, (double)dry.stored)))
// dweight[E,OC,C] += dout^T x of each expert's rows
OP(void, experts_backward_weight, (Summed *dweight, const Stored *dout, const Stored *x, const int32_t *first,
                                   size_t rows, size_t E, size_t C, size_t OC),
   (dweight, dout, x, first, rows, E, C, OC),
   TENSOR(dweight, E * OC * C, SUMMED) TENSOR(dout, rows * OC, STORED) TENSOR(x, rows * C, STORED)
   TENSOR(first, E + 1, sizeof(int32_t)) COUNT(dry_experts_weight(rows, E, C, OC)))

// ---- loss head -----------------------------------------------------------------------------------------------------
// logp[n] = log softmax(z)[target], 0 where target < 0; z of logits[n,V] as `temperature` says (ops.h), with T its
// divisor. With weight (dL/dlogp, [n]) the logits are overwritten by their gradient: weight / T * (onehot(target) -
// softmax), times 1 - (T z / cap)^2 with a cap. With weight NULL they are unchanged afterwards, but not read-only: a
// row's target is replaced while the other words are summed. entropy[n] (may be NULL) = -sum_v p log p of p =
// softmax(z), nats; 0 where target < 0. Rows of logits are `stride` >= V elements apart; gaps between rows are neither
// read nor written.
OP(void, logprob, (Summed *logp, Summed *entropy, Stored *logits, const int32_t *targets, const Summed *weight,
                   size_t n, size_t V, size_t stride, Temperature temperature),
   (logp, entropy, logits, targets, weight, n, V, stride, temperature),
   TENSOR(logp, n, SUMMED) TENSOR(entropy, n, SUMMED) TENSOR(logits, strided(n, V, stride), STORED)
   TENSOR(targets, n, sizeof(int32_t)) TENSOR(weight, n, SUMMED) COUNT(dry_move((weight ? 3 : 1) * n * V, STORED)))

// The likeliest tokens of a teacher. top[n,k]: ids of the k highest of logits[n,V], ascending; of equal logits the
// lower ids. top_logp[n,k] = log softmax(z) at these ids, tail[n] = the sum of softmax(z) over all other ids (0 if k =
// V); z as `temperature` says. Rows with target < 0 get zeros. Rows of logits are `stride` >= V elements apart; k <= V
OP(void, likeliest, (int32_t *top, Summed *top_logp, Summed *tail, const Stored *logits, const int32_t *targets,
                     size_t n, size_t V, size_t k, size_t stride, Temperature temperature),
   (top, top_logp, tail, logits, targets, n, V, k, stride, temperature),
   TENSOR(top, n * k, sizeof(int32_t)) TENSOR(top_logp, n * k, SUMMED) TENSOR(tail, n, SUMMED)
   TENSOR(logits, strided(n, V, stride), STORED) TENSOR(targets, n, sizeof(int32_t)) COUNT(dry_move(3 * n * V, STORED)))
// A student's divergence from a teacher with probabilities p = exp(top_logp[n,k]) at distinct ids top[n,k], ascending,
// and tail[n] at all other ids together. z of logits[n,V] as how.temperature says, T = how.softness, q = softmax(z/T):
//     divergence[n] = sum_j p_j (log p_j - log q_j) + tail (log tail - log(1 - sum_j q_j))
//     logp[n] = log softmax(z)[target]
// Terms with p_j or tail 0 are 0. Both are 0 where target < 0. With weight[n] the logits are overwritten by the
// gradient of weight ((1 - how.share) logp - how.share T^2 divergence). With weight NULL they are unchanged afterwards,
// but not read-only. Gaps between rows are neither read nor written. scratch[n,k]
OP(void, distill, (Summed *logp, Summed *divergence, Stored *logits, const int32_t *targets, const int32_t *top,
                   const Summed *top_logp, const Summed *tail, const Summed *weight, size_t n, size_t V, size_t k,
                   size_t stride, Distillation how, Summed *scratch),
   (logp, divergence, logits, targets, top, top_logp, tail, weight, n, V, k, stride, how, scratch),
   TENSOR(logp, n, SUMMED) TENSOR(divergence, n, SUMMED) TENSOR(logits, strided(n, V, stride), STORED)
   TENSOR(targets, n, sizeof(int32_t)) TENSOR(top, n * k, sizeof(int32_t)) TENSOR(top_logp, n * k, SUMMED)
   TENSOR(tail, n, SUMMED) TENSOR(weight, n, SUMMED) TENSOR(scratch, n * k, SUMMED)
   COUNT(dry_move((weight ? 3 : 1) * n * V, STORED)))

// token[i] = a draw from row i of logits, i < n, rows `stride` >= V elements apart. Temperature 0: the likeliest token
// (the highest logit; of equal ones the lowest id). Else the probabilities are softmax(z) (Temperature, ops.h).
// Candidates are the top_k likeliest tokens (0: all), and of these the fewest likeliest that hold the share top_p. The
// draw is the first candidate, by falling likelihood, at which the sum of probabilities exceeds uniform[i], in [0, 1),
// times the total. Without top_k and top_p the order is by falling ids. A row with a logit that is not finite: -1 - the
// id of the first token with such a logit
OP(void, draw, (int32_t *token, const Stored *logits, const double *uniform, size_t n, size_t V, size_t stride,
                const SamplingSettings *settings, Summed *scratch),
   (token, logits, uniform, n, V, stride, settings, scratch),
   TENSOR(token, n, sizeof(int32_t)) TENSOR(logits, strided(n, V, stride), STORED) TENSOR(uniform, n, sizeof(double))
   TENSOR(scratch, OPS->draw_scratch(V), SUMMED) COUNT(dry_move(n * V, STORED)))
OP_SCRATCH(draw_scratch, (size_t V), (V))

// ---- gradients and the optimizer -----------------------------------------------------------------------------------
// out = in, rounded to Stored
OP(void, round_sums, (Stored *out, const Summed *in, size_t count), (out, in, count),
   TENSOR(out, count, STORED) TENSOR(in, count, SUMMED) COUNT(dry_move(count, STORED + SUMMED)))
// out = in, in fp32
OP_STEP(void, widen, (float *out, const Stored *in, size_t count), (out, in, count),
        TENSOR(out, count, sizeof(float)) TENSOR(in, count, STORED))
// gradient += in
OP(void, gradient_add, (void *gradient, DType type, const Summed *in, size_t count), (gradient, type, in, count),
   TENSOR(gradient, count, dtype_size(type)) TENSOR(in, count, SUMMED))
// sums[parts], parts from squares_parts(count) on: added up in order (squares_total) they give the sum of x's squares
OP_STEP(void, sum_of_squares, (double *sums, size_t parts, const void *x, DType type, size_t count),
        (sums, parts, x, type, count), TENSOR(sums, parts, sizeof(double)) TENSOR(x, count, dtype_size(type)))
// Updates w[count] by AdamW (decoupled decay); master (fp32, may be NULL) holds the weights, w then holds them rounded.
// int8 m and v are codes of the dynamic maps (quantise.h), m's with sign, v's without; a block shares a scale
OP_STEP(void, adamw, (Stored *w, float *master, const void *gradient, DType gradient_type, void *m, void *v,
                      DType moment_type, size_t count, const AdamW *step),
        (w, master, gradient, gradient_type, m, v, moment_type, count, step),
        TENSOR(w, count, STORED) TENSOR(master, count, sizeof(float)) TENSOR(gradient, count, dtype_size(gradient_type))
        TENSOR(m, count, dtype_size(moment_type)) TENSOR(v, count, dtype_size(moment_type))
        TENSOR(step->m_scales, moment_blocks(moment_type, step, count), sizeof(float))
        TENSOR(step->v_scales, moment_blocks(moment_type, step, count), sizeof(float)))

// ---- between processes (world.h); called by every rank of the group, in the same order; never in a group of one ----
// An op may run in parallel with others until its ticket is awaited. Until then, do not write its memory or read its
// results. Tickets grow; ops are done in order. A rank's part of x is shard_range(count, unit, ranks of the group,
// rank). reduce_scatter adds up x[count] of all ranks: each rank's part of x becomes the sums; the rest of x is
// undefined
OP_MEMORY(int64_t, reduce_scatter, (RankGroup group, Summed *x, size_t count, size_t unit), (group, x, count, unit),
          TENSOR(x, count, SUMMED))
// x[count] of elements of `size` bytes: each rank's part is copied to all other ranks
OP_MEMORY(int64_t, all_gather, (RankGroup group, void *x, size_t count, size_t unit, size_t size),
          (group, x, count, unit, size), TENSOR(x, count, size))
// sends messages[n] to other ranks and receives messages from them; every `out` matches an `in` of the peer rank, in
// the order of this list
OP_MEMORY(int64_t, exchange, (RankGroup group, const Message *messages, size_t n), (group, messages, n),
          COUNT(dry_messages(messages, n)))
// makes later ops and copies wait until this op and all earlier ones are done
OP_MEMORY(void, await, (int64_t ticket), (ticket), )

// clang-format on
#undef OP
#undef OPS
#undef OP_HOST
#undef OP_SCRATCH
#undef OP_MEMORY
#undef OP_STEP
#undef OP_GRAPH
#undef TENSOR
#undef KEYS
#undef PLACE
#undef COUNT
