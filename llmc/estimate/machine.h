/*
Machines and their rates in bf16: a row per kind of node, with the memory that its card leaves to a plan. Also computes
how long work and traffic take on them. Used by estimate.h, choose.h and the floors of profile.h.

Each number is printed with its source; estimates are no better than these numbers.
*/
#ifndef LLMC_MACHINE_H
#define LLMC_MACHINE_H
#include <ctype.h>
#include "llmc/data/deal.h"
#include "llmc/ranks/world.h"
#include "llmc/base/utils.h"
#include "llmc/plan/plan.h"

#define GIBIBYTE (1024.0 * 1024 * 1024)

// Source of a constant
typedef enum { BASIS_MEASURED, BASIS_DATA_SHEET, BASIS_ASSUMED, BASIS_SIMULATED, BASES } Basis;
static const char *const basis_names[BASES] = {
    "measured with this program on one H100 (dev/gpu_speed.md, 2026-11-26; cuDNN 9.19.0)",
    "NVIDIA's data sheets (dense; links in one direction)", "assumed",
    "simulated from machine code (STREAMBP_WGMMA; dev/cuda/cycles.py), never measured"};

typedef enum {
    GPUS_PER_NODE,
    PEAK_FLOPS, // FLOP/s of the data sheet
    PRODUCT_FLOPS,
    ATTENTION_FORWARD_FLOPS,   // with cuDNN, like the next four; pairs without a mask
    MASKED_FORWARD_FLOPS,      // rate of AttentionCounts.masked
    ATTENTION_BACKWARD_FLOPS,  // deterministic
    ATTENTION_ANY_ORDER_FLOPS, // backward, with sums in any order
    MASKED_ANY_ORDER_FLOPS,
    OWN_FORWARD_FLOPS, // attention with our own kernels
    OWN_BACKWARD_FLOPS,
    EXPERTS_FLOPS,    // products of experts with our own kernel
    DELTA_FLOPS,      // the delta rule of linear attention
    MEMORY_BANDWIDTH, // bytes per second of a GPU, like the next three
    LINK_WITHIN,      // rate to GPUs of the same node
    LINK_BETWEEN,     // rate to GPUs of other nodes
    LINK_HOST,        // rate to host memory, in one direction
    MEMORY_SHARE,     // share of memory's bandwidth that ops reach
    LINK_SHARE,       // share of a link's bandwidth that large messages reach
    HOP_WITHIN,       // seconds of latency from one GPU to the next in a collective
    HOP_BETWEEN,
    LAUNCH_GAP, // seconds from the end of a kernel to the start of the next
    DISK_WRITE, // bytes per second of a node's disk
    DISK_READ,
    WGMMA_EXPERTS_FLOPS,  // products of experts by kernels for Hopper, forward and input; 0: these kernels are off
    WGMMA_BACKWARD_FLOPS, // attention backward by them, with heads of wgmma_heads[0], [1], ..
    MACHINE_CONSTANTS = WGMMA_BACKWARD_FLOPS + WGMMA_HEADS
} MachineConstant;

// Printing of constants: value / unit
static const struct {
    const char *name, *suffix;
    double unit;
    Basis basis; // BASIS_MEASURED: counts as assumed unless Machine.measured
} machine_constants[MACHINE_CONSTANTS] = {
    {"GPUs of a node", "", 1, BASIS_ASSUMED},
    {"peak", " TFLOP/s", 1e12, BASIS_DATA_SHEET},
    {"products", " TFLOP/s", 1e12, BASIS_MEASURED},
    {"attention forward", " TFLOP/s", 1e12, BASIS_MEASURED},
    {"causal", " TFLOP/s", 1e12, BASIS_MEASURED},
    {"attention backward", " TFLOP/s", 1e12, BASIS_MEASURED},
    {"attention backward in any order", " TFLOP/s", 1e12, BASIS_MEASURED},
    {"causal", " TFLOP/s", 1e12, BASIS_MEASURED},
    {"attention forward by our own kernels", " TFLOP/s", 1e12, BASIS_ASSUMED},
    {"backward", " TFLOP/s", 1e12, BASIS_ASSUMED},
    {"products of experts", " TFLOP/s", 1e12, BASIS_ASSUMED},
    {"delta rule", " TFLOP/s", 1e12, BASIS_ASSUMED},
    {"memory bandwidth", " GB/s", 1e9, BASIS_DATA_SHEET},
    {"link within a node", " GB/s", 1e9, BASIS_DATA_SHEET},
    {"link between nodes", " GB/s", 1e9, BASIS_DATA_SHEET},
    {"link to the host", " GB/s", 1e9, BASIS_DATA_SHEET},
    {"memory bandwidth reached", " %", 0.01, BASIS_ASSUMED},
    {"link bandwidth reached", " %", 0.01, BASIS_ASSUMED},
    {"hop within a node", " us", 1e-6, BASIS_ASSUMED},
    {"hop between nodes", " us", 1e-6, BASIS_ASSUMED},
    {"gap between kernels", " us", 1e-6, BASIS_MEASURED},
    {"disk of a node, writes", " GB/s", 1e9, BASIS_ASSUMED},
    {"reads", " GB/s", 1e9, BASIS_ASSUMED},
    {"products of experts, not of weights' gradients", " TFLOP/s", 1e12, BASIS_SIMULATED},
    {"attention backward, heads of 64", " TFLOP/s", 1e12, BASIS_SIMULATED},
    {"of 128", " TFLOP/s", 1e12, BASIS_SIMULATED},
    {"of 256", " TFLOP/s", 1e12, BASIS_SIMULATED},
};

typedef struct {
    const char *name, *gpu;
    const char *device;              // part of the card's name in CUDA
    int architecture;                // compute capability, 90: sm_90
    double card_gib;                 // memory that CUDA reports
    double host_gib;                 // host memory of a node, for plans
    int measured, board;             // board: 1: sold without a node, so its links are assumed; 2: in a desktop
    double value[MACHINE_CONSTANTS]; // indexed by MachineConstant
    double disk_gib;                 // disk of a node, for plans; 0: no disk
    int host_given;                  // 0: host_gib is assumed
    size_t cards;                    // cards in "h100x8"; 0: not given
} Machine;

// H100: rates with which the estimates of passes over Qwen3-8B and Qwen3.5-9B agree with measurements within 5 %, at
// 4,096 to 131,072 tokens and chunks of 2048 to 8192 (dev/gpu_log.md). A kernel alone is faster: products 790 TFLOP/s,
// attention forward 677. Deterministic backward writes dS to memory and reads it again. The gap holds what a small
// kernel loses at its start and end. The delta rule's blocks of 64 tokens depend on each other. Its rate is what
// dev/cuda/cycles.py finds in the machine code, with a fifth more time, as measured for kernels that have run. Products
// of experts in full tiles reach 300 to 320 TFLOP/s on an H200. Our own attention is assumed to reach two fifths of
// mma.sync's peak; backward computes 7 products for 5. Heads of other widths are slower (head_slowness in
// llmc/ops/ops_dry.h). H200: as an H100. A100: the same shares of its own peak; mma.sync reaches all of it. B200:
// FlashAttention-4 is published at 1605 TFLOP/s forward, 1.3 times cuDNN 9.13; products at the H100's share, mma.sync
// as on an H100. Desktop cards and an L40S: products at a tenth above the share of the peak that LLMQ prints for a pass
// of a 7B model (RTX 4090 72 %, 5090 66 %, L40S 47 %); attention as fast as products; the ratio of backward to forward
// as on the H100. Their peaks have fp32 sums. Links of a GPU: NVLink of 600 (A100), 900 (H100, H200), 1800 GB/s (B200),
// both directions together. InfiniBand of 200 Gb/s (HDR), 400 Gb/s (NDR), an adapter for each GPU. To the host: PCIe
// 4.0 x16 (A100, L40S, RTX 30 and 40), 5.0 x16. Cards without NVLink send through host memory, at half of that rate.
// The link's share was measured on an H100. Shares of memory and hops are of the usual order for memory-bound kernels
// and NCCL's rings. A disk is a PCIe 4.0 NVMe. Memory that CUDA reports: the least "total capacity of" a card of this
// kind in public reports of PyTorch, 2023 to 2026. The driver keeps the rest, and ECC a sixteenth where it takes
// memory.
#define CARD_RESERVED GIBIBYTE // assumed: a context of 0.5 GiB, libraries' workspaces, memory that memory.cuh spares
// Assumed: what NCCL takes between ranks, and for each peer of exchanges (its issues 864: 1.6 GB for a communicator;
// 1685: 3.3 GB more after exchanges with 7 peers). Groups that are split off share the memory of a pair (986). Another
// pair of a ring: 24 channels of 10 MiB (1685)
#define NCCL_BYTES      (1.5 * GIBIBYTE)
#define NCCL_PEER_BYTES (0.45 * GIBIBYTE)
#define NCCL_RING_BYTES (0.25 * GIBIBYTE)
#define RATES(peak, products, forward, own)                                                                            \
    peak, products, forward, (forward)*523 / 593, (forward)*422 / 593, (forward)*493 / 593, (forward)*417 / 593, own,  \
        (own)*0.58, (own)*1.24, (own)*0.19
#define RATES_H100     RATES(989e12, 680e12, 593e12, 250e12)
#define RATES_A100     RATES(312e12, 312e12 * 680 / 989, 312e12 * 593 / 989, 125e12)
#define RATES_B200     RATES(2250e12, 2250e12 * 680 / 989, 1235e12, 250e12)
#define RATES_OF(p, s) RATES(p, (p) * (s), (p) * (s), 0.4 * (p)) // products reach the share s of the peak p
#define CARD(name, gpu, device, sm, card, host, measured, board, gpus, rates, memory, within, between, link)           \
    {                                                                                                                  \
        name, gpu, device, sm, card, host, measured, board,                                                            \
            {gpus, rates, memory, within, between, link, 0.85, 0.85, 2e-6, 5e-6, 6e-6, 5e9, 6e9}, 0, 0, 0              \
    }
#define MACHINE_NAMES "a100|h100|h200|a100-40|b200|l40s|rtx5090|rtx4090|rtx4080|rtx3060"

typedef enum { MACHINE_A100, MACHINE_H100, MACHINE_H200, MACHINES = 10 } MachineName; // in the order of MACHINE_NAMES

static const Machine machines[MACHINES] = {
    CARD("a100", "A100 SXM 80 GB", "A100-SXM4-80GB", 80, 79.1, 1800, 0, 0, 8, RATES_A100, 2.0e12, 300e9, 25e9, 32e9),
    CARD("h100", "H100 SXM", "H100 80GB", 90, 79.1, 1800, 1, 0, 8, RATES_H100, 3.35e12, 450e9, 50e9, 64e9),
    CARD("h200", "H200 SXM", "H200", 90, 139.8, 1800, 0, 0, 8, RATES_H100, 4.8e12, 450e9, 50e9, 64e9),
    CARD("a100-40", "A100 SXM 40 GB", "A100-SXM4-40GB", 80, 39.4, 900, 0, 0, 8, RATES_A100, 1.555e12, 300e9, 25e9,
         32e9),
    CARD("b200", "B200", "B200", 100, 178.3, 1800, 0, 0, 8, RATES_B200, 8e12, 900e9, 50e9, 64e9),
    CARD("l40s", "L40S", "L40S", 89, 44.4, 900, 0, 1, 8, RATES_OF(362e12, 0.52), 864e9, 16e9, 25e9, 32e9),
    CARD("rtx5090", "RTX 5090", "RTX 5090", 120, 31.3, 116, 0, 2, 4, RATES_OF(209.5e12, 0.73), 1.792e12, 32e9, 12.5e9,
         64e9),
    CARD("rtx4090", "RTX 4090", "RTX 4090", 89, 23.5, 116, 0, 2, 4, RATES_OF(165.2e12, 0.79), 1.008e12, 16e9, 12.5e9,
         32e9),
    CARD("rtx4080", "RTX 4080", "RTX 4080", 89, 15.4, 56, 0, 2, 4, RATES_OF(97.5e12, 0.79), 716.8e9, 16e9, 12.5e9,
         32e9),
    CARD("rtx3060", "RTX 3060", "RTX 3060", 86, 11.5, 56, 0, 2, 4, RATES_OF(25.5e12, 0.79), 360e9, 16e9, 12.5e9, 32e9),
};
#undef CARD
#undef RATES
#undef RATES_H100
#undef RATES_A100
#undef RATES_B200
#undef RATES_OF

// Returns the bytes that the machine's card leaves to a plan.
static size_t machine_usable_bytes(const Machine *m) { return (size_t)(m->card_gib * GIBIBYTE - CARD_RESERVED); }

// Returns the bytes of device memory that NCCL takes on a rank. Exchanges are with the next rank and the previous one.
// deals: groups of every size (--sp auto), whose first and last ranks are a pair of their own; the ranks between have
// the same neighbours
static size_t collectives_bytes(World w, int deals) {
    size_t peers = min_size((deals ? world_ranks(w) : world_sp(w)) - 1, 2);
    if (deals) peers = max_size(peers, deal_levels(world_ranks(w)).levels - 1);
    const double rings = peers > 2 ? (double)peers - 2 : 0;
    return world_ranks(w) > 1 ? (size_t)(NCCL_BYTES + (double)peers * NCCL_PEER_BYTES + rings * NCCL_RING_BYTES) : 0;
}

// Rates of kernels by Hopper's own instructions. dev/cuda/cycles.py finds 765 to 876 TFLOP/s for products of experts in
// full tiles, and 581, 676 and 611 for attention backward. A fifth more time is added as above. For attention the rate
// in a pass is 0.87 of the rate alone, as measured forward (593 of 677).
static const double wgmma_rates[1 + WGMMA_HEADS] = {650e12, 420e12, 490e12, 445e12};

// Tells whether estimates for this machine take kernels that were only simulated.
static int machine_simulated(const Machine *m) { return m->value[WGMMA_EXPERTS_FLOPS] > 0; }

// Returns what estimates of this model say of their rates: "", or " by simulated kernels".
static const char *machine_basis(const Machine *m, const Config *c) {
    const int takes = c->num_experts || wgmma_takes_head(c->head_dim) || wgmma_takes_head(c->global_head_dim);
    return machine_simulated(m) && takes ? " by simulated kernels" : "";
}

// Returns the machine with the kernels for Hopper that STREAMBP_WGMMA asks for.
static Machine machine_with_wgmma(Machine m) {
    if (m.architecture == 90 && wgmma_wanted()) memcpy(&m.value[WGMMA_EXPERTS_FLOPS], wgmma_rates, sizeof(wgmma_rates));
    return m;
}

static KernelRates machine_kernels(const Machine *m) {
    const double weight = m->value[EXPERTS_FLOPS] / m->value[PRODUCT_FLOPS];
    KernelRates rates = {weight, weight, {0}, 0};
    if (!machine_simulated(m)) return rates;
    rates.activates = 1;
    rates.experts = m->value[WGMMA_EXPERTS_FLOPS] / m->value[PRODUCT_FLOPS];
    for (int i = 0; i < WGMMA_HEADS; i++)
        rates.backward[i] = m->value[WGMMA_BACKWARD_FLOPS + i] / m->value[OWN_BACKWARD_FLOPS];
    return rates;
}

// Finds a card's row by its name in CUDA; NULL: none. PCIe, NVL and laptop boards are slower than their namesakes and
// have no row.
static const Machine *machine_of_device(const char *name) {
    static Machine simulated;
    if (strstr(name, "PCIe") || strstr(name, "NVL") || strstr(name, "Laptop")) return NULL;
    for (int i = 0; i < MACHINES; i++) {
        if (!strstr(name, machines[i].device)) continue;
        simulated = machine_with_wgmma(machines[i]);
        return machine_simulated(&simulated) ? &simulated : &machines[i];
    }
    return NULL;
}

// Finds the row of "h100", "RTX 4090" or "4090", and the cards in "h100x8" (0: not given). NULL: none
static const Machine *machine_find(const char *text, size_t length, size_t *cards) {
    char name[32], *times;
    size_t used = 0;
    for (size_t i = 0; i < length && used + 1 < sizeof(name); i++)
        if (text[i] != ' ') name[used++] = (char)tolower((unsigned char)text[i]);
    name[used] = 0, *cards = 0;
    for (int counted = 0; counted < 2; counted++, *times = 0) {
        for (int i = 0; i < MACHINES; i++)
            if (!strcmp(name, machines[i].name + (*name != 'r' && machines[i].board == 2 ? strlen("rtx") : 0)))
                return &machines[i];
        times = strrchr(name, 'x');
        if (!times || !parse_size(times + 1, cards) || !*cards || *cards > 1 << 20) return NULL;
    }
    return NULL;
}

// Returns the host memory in GiB for `cards` cards of a node: all of it if it was given or in a desktop, else the
// cards' share.
static double machine_host_gib(const Machine *m, double cards) {
    return m->host_gib * (m->host_given || m->board == 2 ? 1 : cards / m->value[GPUS_PER_NODE]);
}

static const char *machine_host_basis(const Machine *m) {
    return m->host_given ? "given" : m->board == 2 ? "assumed" : "an eighth of a node, assumed";
}

// Parses "NAME[xCARDS][,host=BYTES][,disk=BYTES][,disk-rate=BYTES]": a node's host memory and disk, the disk's bytes
// per second. Returns 0 on an error, with its text in `wrong`.
static int machine_parse(Machine *m, const char *text, char *wrong, size_t size) {
    static const char *const keys[] = {"host", "disk", "disk-rate"};
    const size_t length = strcspn(text, ",");
    size_t bytes[3], cards;
    const Machine *row = machine_find(text, length, &cards);
    if (!row) {
        snprintf(wrong, size, "'%.*s' is no machine", (int)min_size(length, 32), text);
        return 0;
    }
    *m = machine_with_wgmma(*row), m->cards = cards;
    for (text += length; *text; text += strcspn(text, ",")) {
        char value[32];
        size_t k = 0;
        const size_t name = strcspn(++text, "=,"), whole = strcspn(text, ",");
        while (k < 3 && (strlen(keys[k]) != name || strncasecmp(keys[k], text, name) != 0)) k++;
        snprintf(value, sizeof(value), "%.*s", (int)(whole > name ? whole - name - 1 : 0), text + name + 1);
        if (k == 3 || !parse_bytes(value, &bytes[k]) || (bytes[k] < (size_t)1 << 20 && (bytes[k] || k == 2))) {
            snprintf(wrong, size, "'%.*s' is not host=128GiB, disk=2TB or disk-rate=3GB", (int)min_size(whole, 32),
                     text);
            return 0;
        }
        if (k == 0) m->host_gib = (double)bytes[0] / GIBIBYTE, m->host_given = 1;
        if (k == 1) m->disk_gib = (double)bytes[1] / GIBIBYTE;
        if (k == 2) m->value[DISK_WRITE] = m->value[DISK_READ] = (double)bytes[2];
    }
    return 1;
}

// Returns the FLOPs of products per byte of memory bandwidth (DryCount.ridge).
static double machine_ridge(const Machine *m) {
    return m->value[PRODUCT_FLOPS] / (m->value[MEMORY_BANDWIDTH] * m->value[MEMORY_SHARE]);
}

// Returns the window of heads of head_dim if no layer's head_dim heads see all keys, else 0.
static size_t window_of_heads(const Config *c) {
    const int all = c->global_head_dim || layers_of_kind(c, LAYER_WINDOW) == c->num_hidden_layers;
    return all ? window_of_model(c) : 0;
}

// Returns the directions of this model's attention that are planned with cuDNN.
static int machine_attends(const Machine *m, const Model *model) {
    const Config *c = &model->config;
    const int takes = LIBRARY_FORWARD + LIBRARY_BACKWARD * library_takes_window(c->head_dim, window_of_heads(c), 1);
    if (model->dtype != DTYPE_BF16) return 0;
    return (cudnn_directions(m->architecture, c->head_dim) & takes) +
           LIBRARY_GLOBAL * (c->global_head_dim ? cudnn_directions(m->architecture, c->global_head_dim) : 0);
}

#define CONSTANTS_COLUMNS 80 // width after which a line ends

// Prints a machine's constants, grouped by basis (data sheet, measured, assumed), then the bytes of device memory, host
// memory and disk.
static void machine_print(FILE *out, const Machine *m) {
    const char *head = "machine";
    for (int basis = 0; basis < BASES; basis++) {
        int printed = 0;
        for (int i = 0; i < MACHINE_CONSTANTS; i++) {
            Basis from = machine_constants[i].basis;
            if ((from == BASIS_MEASURED && !m->measured) || (m->board && (i == LINK_WITHIN || i == LINK_BETWEEN)))
                from = BASIS_ASSUMED;
            if (from != (Basis)basis || m->value[i] == 0) continue;
            if ((i == DISK_WRITE || i == DISK_READ) && m->disk_gib == 0) continue;
            if (!printed) fprintf(out, "%-8s %s:\n", head, basis_names[basis]);
            if (printed > CONSTANTS_COLUMNS || !printed)
                fputs(printed ? ",\n         " : "         ", out), printed = 9;
            else
                printed += fprintf(out, ", ");
            printed += fprintf(out, "%s %.4g%s", machine_constants[i].name, m->value[i] / machine_constants[i].unit,
                               machine_constants[i].suffix);
        }
        if (printed) fputc('\n', out), head = "";
    }
    fprintf(out, "         memory for a plan: %s; CUDA's total in public reports of 2023 to 2026, less 1 GiB\n",
            human_bytes((double)machine_usable_bytes(m)));
    fprintf(out, "         of several ranks: less %s for NCCL, and %s for each of two peers with --sp, assumed\n",
            human_bytes(NCCL_BYTES), human_bytes(NCCL_PEER_BYTES));
    fprintf(out, "         host memory: %s, %s; disk: %s\n", human_bytes(machine_host_gib(m, 1) * GIBIBYTE),
            machine_host_basis(m), m->disk_gib > 0 ? human_bytes(m->disk_gib * GIBIBYTE) : "none");
}

// Returns the share of attention's work that our own kernels compute.
static double own_share(const OpCounts *w) {
    return (w->own_forward + w->own_backward) / fmax(w->attention_forward + w->attention_backward, 1);
}

// ---- how long things take ------------------------------------------------------------------------------------------
// Seconds of counted work. memory: seconds of memory-bound ops; gaps: seconds between kernels
typedef struct {
    double products, attention_forward, attention_backward, delta, memory, gaps;
} WorkTime;

static WorkTime work_time(const Machine *m, OpCounts w) {
    const double bandwidth = m->value[MEMORY_BANDWIDTH] * m->value[MEMORY_SHARE];
    const double products = w.flops - w.attention_forward - w.attention_backward - w.delta;
    WorkTime t;
    t.products = fmax((products + w.stalled) / m->value[PRODUCT_FLOPS], w.operands / bandwidth);
    t.attention_forward = (w.attention_forward - w.own_forward - w.masked_forward) / m->value[ATTENTION_FORWARD_FLOPS] +
                          w.masked_forward / m->value[MASKED_FORWARD_FLOPS] +
                          w.slow_forward / m->value[ATTENTION_FORWARD_FLOPS] +
                          (w.own_forward + w.slow_own_forward) / m->value[OWN_FORWARD_FLOPS];
    t.attention_backward = (w.attention_backward - w.any_order - w.own_backward) / m->value[ATTENTION_BACKWARD_FLOPS] +
                           (w.any_order - w.masked_any_order) / m->value[ATTENTION_ANY_ORDER_FLOPS] +
                           w.masked_any_order / m->value[MASKED_ANY_ORDER_FLOPS] +
                           w.slow_backward / m->value[ATTENTION_BACKWARD_FLOPS] +
                           (w.own_backward + w.slow_own_backward) / m->value[OWN_BACKWARD_FLOPS];
    t.delta = w.delta / m->value[DELTA_FLOPS];
    t.memory = w.moved / bandwidth;
    t.gaps = w.launches * m->value[LAUNCH_GAP];
    return t;
}

static double work_seconds(const Machine *m, OpCounts w) {
    const WorkTime t = work_time(m, w);
    return t.products + t.attention_forward + t.attention_backward + t.delta + t.memory + t.gaps;
}

// Seconds that a kernel of a decoding step takes besides its bytes, as part of a graph. Fits the steps of Qwen3-0.6B
// and 8B with 2 texts on an H200, 2.1 and 6.0 ms of 452 and 580 kernels (dev/gpu_log.md), with the share of the
// bandwidth above.
static const double DECODE_GAP = 3.95e-6;

// Returns the seconds of a token of one text: everything is bound by memory. cuda/attention_split.cuh, too: 64 keys of
// up to 16 heads of 128 take 1022 cycles of an H100's multiprocessor (dev/cuda/cycles.py), 7.4 TB/s.
static double token_seconds(const Machine *m, const OpCounts *w) {
    return (w->operands + w->moved) / (m->value[MEMORY_BANDWIDTH] * m->value[MEMORY_SHARE]) + w->launches * DECODE_GAP;
}

// Returns the seconds of ring collectives: bytes by the slower of the links, plus hops by their latencies. Each rank of
// a group of `size` sends `bytes` in `hops`. Groups fill node after node. Across nodes, each rank of a group's part on
// a node begins a ring, so that all their network adapters send.
static double ring_seconds(const Machine *m, size_t ranks, size_t size, double bytes, double hops) {
    const size_t node = (size_t)m->value[GPUS_PER_NODE];
    const double together = (double)(ranks <= node ? size : greatest_common_divisor(node, size)); // least ranks of a
                                                                                                  // group within a node
    const double nodes = (double)size / together;
    double bandwidth = m->value[LINK_WITHIN], between = 0;
    if (size <= 1) return 0;
    if (nodes > 1) {
        bandwidth = fmin(bandwidth, together * m->value[LINK_BETWEEN]);
        between = (nodes - 1) / (double)(size - 1); // share of the hops that cross nodes
    }
    return bytes / (bandwidth * m->value[LINK_SHARE]) +
           hops * (between * m->value[HOP_BETWEEN] + (1 - between) * m->value[HOP_WITHIN]);
}

#endif
