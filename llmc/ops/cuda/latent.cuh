/*
Latent attention of op set "cuda": keys and values of heads from one product of the latents and the part of the keys
that all heads share, and the gradients back. A thread takes a pack of 16 bytes of every head's row, or of the shared
part. Bytes moved per token and head of HD elements, of which R are shared: latent_expand about 4 HD s, latent_fold
2 HD (4 + s), latent_trim 2 VD s, back (VD + HD) s; sums_add 8 + s per element.
*/
#ifndef LLMC_CUDA_LATENT_CUH
#define LLMC_CUDA_LATENT_CUH
#include "platform.cuh"

template <int W> __device__ inline Pack<floatX, W> no_values(void) {
    Pack<floatX, W> zeros;
    for (int j = 0; j < W; j++) zeros.x[j] = store(0.0f);
    return zeros;
}

// Columns [0, own) of a row of kv belong to the key, the next VD to the value, which zeros pad. Keys end in the token's
// shared part.
template <int W>
__global__ void latent_expand_kernel(floatX *k, floatX *v, const floatX *kv, const floatX *shared, size_t rows,
                                     size_t heads, size_t HD, size_t VD, size_t R) {
    const size_t own = HD - R, row = own + VD, all = own + HD;
    FOR_EACH_ROW(i, c, W, rows, all + R) {
        if (c < row)
            pack_write(c < own ? k + i * HD + c : v + i * HD + c - own, pack_read<W>(kv + i * row + c));
        else if (c < all)
            pack_write(v + i * HD + c - own, no_values<W>());
        else
            pack_write(k + i * HD + own + c - all, pack_read<W>(shared + i / heads * R + c - all));
    }
}

template <int W, bool BACK>
__global__ void latent_trim_kernel(floatX *wide, floatX *narrow, size_t rows, size_t HD, size_t VD) {
    FOR_EACH_ROW(i, c, W, rows, BACK ? HD : VD) {
        if (!BACK)
            pack_write(narrow + i * VD + c, pack_read<W>(wide + i * HD + c));
        else
            pack_write(wide + i * HD + c, c < VD ? pack_read<W>(narrow + i * VD + c) : no_values<W>());
    }
}

// Rounds W sums.
template <int W> __device__ inline void latent_round(floatX *to, const float *from) {
    Pack<floatX, W> result;
    for (int j = 0; j < W; j++) result.x[j] = store(from[j]);
    pack_write(to, result);
}

template <int W>
__global__ void latent_fold_kernel(floatX *dkv, float *dshared, const float *dk, const float *dv, size_t n,
                                   size_t heads, size_t HD, size_t VD, size_t R) {
    const size_t own = HD - R, row = own + VD;
    FOR_EACH_ROW(t, c, W, n, row + R) {
        float sum[W] = {};
        for (size_t i = t * heads; i < (t + 1) * heads; i++) {
            if (c < row)
                latent_round<W>(dkv + i * row + c, c < own ? dk + i * HD + c : dv + i * HD + c - own);
            else
                for (int j = 0; j < W; j++) sum[j] += dk[i * HD + own + c - row + j];
        }
        for (int j = 0; c >= row && j < W; j++) dshared[t * R + c - row + j] += sum[j];
    }
}

template <int W> __global__ void sums_add_kernel(float *sums, const floatX *in, size_t packs) {
    FOR_EACH_PACK(i, packs) {
        const Pack<floatX, W> values = pack_read<W>(in + i * W);
        for (int j = 0; j < W; j++) sums[i * W + j] += load(values.x[j]);
    }
}

static bool latent_packs(size_t HD, size_t VD, size_t R) {
    return HD % full_pack<floatX> == 0 && VD % full_pack<floatX> == 0 && R % full_pack<floatX> == 0;
}

static void cuda_latent_expand(Stored *k, Stored *v, const Stored *kv, const Stored *shared, size_t n, size_t heads,
                               size_t HD, size_t VD, size_t R) {
    with_width<floatX>(latent_packs(HD, VD, R) && all_aligned(k, v, kv, shared), [&](auto W) {
        LAUNCH((latent_expand_kernel<W>), rows_grid(n * heads, 2 * HD / W), rows_threads(2 * HD / W), 0)
        ((floatX *)k, (floatX *)v, (const floatX *)kv, (const floatX *)shared, n * heads, heads, HD, VD, R);
    });
}

static void cuda_latent_trim(Stored *wide, Stored *narrow, size_t n, size_t heads, size_t HD, size_t VD, int back) {
    const size_t width = back ? HD : VD;
    with_width<floatX>(latent_packs(HD, VD, 0) && all_aligned(wide, narrow), [&](auto W) {
        with_flag(back, [&](auto BACK) {
            LAUNCH((latent_trim_kernel<W, BACK>), rows_grid(n * heads, width / W), rows_threads(width / W), 0)
            ((floatX *)wide, (floatX *)narrow, n * heads, HD, VD);
        });
    });
}

static void cuda_latent_fold(Stored *dkv, Summed *dshared, const Summed *dk, const Summed *dv, size_t n, size_t heads,
                             size_t HD, size_t VD, size_t R) {
    with_width<floatX>(latent_packs(HD, VD, R) && all_aligned(dkv), [&](auto W) {
        LAUNCH((latent_fold_kernel<W>), rows_grid(n, (HD + VD) / W), rows_threads((HD + VD) / W), 0)
        ((floatX *)dkv, (float *)dshared, (const float *)dk, (const float *)dv, n, heads, HD, VD, R);
    });
}

static void cuda_sums_add(Summed *sums, const Stored *in, size_t count) {
    with_width<floatX>(count % full_pack<floatX> == 0 && all_aligned(in), [&](auto W) {
        LAUNCH((sums_add_kernel<W>), loop_grid(count / W), LOOP_THREADS, 0)
        ((float *)sums, (const floatX *)in, count / W);
    });
}

#endif
