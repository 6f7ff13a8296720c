/* SPDX-License-Identifier: Apache-2.0 */
/* A packed weight in memory, conversions of numbers, and what an instruction set offers. Shared by cpu*.h and cpu.c. */

#ifndef HF_MXFP4_CPU_H
#define HF_MXFP4_CPU_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && defined(__x86_64__)
#define X86 1
#elif defined(__GNUC__) && defined(__aarch64__) && !defined(__ARM_BIG_ENDIAN)
#define NEON 1
#endif

#if defined(__GNUC__)
#define ALWAYS static inline __attribute__((always_inline, unused))
#else
#define ALWAYS static __forceinline
#endif

#if defined(__GNUC__) && !defined(__clang__)
#define UNROLL _Pragma("GCC unroll 16")
#else
#define UNROLL
#endif

#define MACRO_BLOCK 128
#define SPAN 2048 /* weights of a row whose scales are decoded at a time; whole macro-blocks */

#define ROWS 16 /* rows a thread takes at a time */
#define PIECE 512 /* outliers that are looked at together */

enum dtype { NONE, F32, BF16, F16 };

/* One matrix [n, k]. Rows may stand apart (strides in bytes); what lies within a row is dense. */
struct weight {
    const uint8_t *packed, *scale, *macro; /* macro: NULL without macro factors */
    int64_t packed_stride, scale_stride, macro_stride, n, k;
    int e8m0; /* 1: E8M0 scales for 32 weights; 0: E4M3 scales for 16 */
    const float *global_scale; /* or NULL */
    const void *values, *columns; /* outliers as compressed sparse rows; values NULL without */
    const int32_t *offsets;
    int64_t value_count;
    int value_type, column_bytes;
};

/* Sums [tokens][ROWS], of which those of one row, with x in float32 in even/odd order (`order_f32`), `stride` apart. */
typedef void (*f32_kernel)(const struct weight *, int64_t row, const float *x, int64_t stride, int tokens, float *sums);
/* Sums [tokens][ROWS] of up to ROWS rows with bfloat16 x in the order of its own `order_bf16`. */
typedef void (*bf16_kernel)(const struct weight *, int64_t row, int rows, const uint16_t *x, int64_t stride,
                            int tokens, float *sums);
/* Adds outliers to sums; see cpu_rows.h, like the next. */
typedef void (*outlier_kernel)(const float *values, const int32_t *columns, const int32_t *ends, int rows,
                               const float *x, int64_t k, int tokens, float *sums);
typedef void (*finish_kernel)(const float *sums, const float *bias, int rows, void *out, int type);
/* A row in natural order in a dtype, without its outliers. */
typedef void (*decode_kernel)(const struct weight *, int64_t row, void *out, int type);
/* A row of x reordered; returns 0, and leaves `out` undefined, if a value is one the bfloat16 kernel cannot take. */
typedef int (*bf16_order)(const struct weight *, const uint16_t *x, uint16_t *out);

static float E8M0[256], E4M3[256]; /* values of scale bytes; filled once */

ALWAYS float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

ALWAYS uint32_t to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

ALWAYS uint16_t to_bf16(float value)
{
    const uint32_t bits = to_bits(value), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

ALWAYS float from_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
    if (magnitude >= 0x7c00)
        return from_bits(sign | 0x7f800000 | magnitude << 13);
    if (magnitude >= 0x0400)
        return from_bits(sign | ((magnitude << 13) + 0x38000000));
    return from_bits(sign | to_bits((float)magnitude * 0x1p-24f));
}

ALWAYS uint16_t to_f16(float value)
{
    const uint32_t bits = to_bits(value), magnitude = bits & 0x7fffffff;
    /* Adding 0.5 rounds to multiples of 2^-24, float16's smallest number. */
    const uint32_t small = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000;
    uint32_t half = (magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13;
    half = magnitude < 0x38800000 ? small : half; /* 2^-14 */
    half = magnitude >= 0x47800000 ? 0x7c00 : half; /* 2^16 */
    half = magnitude > 0x7f800000 ? 0x7e00 : half;
    return (uint16_t)(half | (bits >> 16 & 0x8000));
}

ALWAYS float load_as(const void *data, int type, int64_t index)
{
    if (type == F32)
        return ((const float *)data)[index];
    uint16_t half = ((const uint16_t *)data)[index];
    return type == BF16 ? from_bits((uint32_t)half << 16) : from_f16(half);
}

ALWAYS void store_as(void *data, int type, int64_t index, float value)
{
    if (type == F32)
        ((float *)data)[index] = value;
    else
        ((uint16_t *)data)[index] = type == BF16 ? to_bf16(value) : to_f16(value);
}

/* Whether bfloat16 holds all decoded weights: a code times a scale does; a tensor scale must be a power of two. */
ALWAYS int exact_in_bf16(const struct weight *w)
{
    if (w->macro)
        return 0;
    if (!w->global_scale)
        return 1;
    const uint32_t bits = to_bits(*w->global_scale);
    return !w->e8m0 && !(bits & 0x807fffff) && bits >= 0x0d800000 && bits <= 0x71800000; /* 2^-100 .. 2^100 */
}

/* Scales, times macro factors, of the weights [k, k + span) of a row, a zero behind them: an odd block has a mate. */
ALWAYS void block_scales(const struct weight *w, int64_t row, int64_t k, int64_t span, float *out)
{
    const int block = w->e8m0 ? 32 : 16;
    const uint8_t *scale = w->scale + row * w->scale_stride + k / block;
    const float *values = w->e8m0 ? E8M0 : E4M3;
    const int64_t count = span / block;
    for (int64_t b = 0; b < count; b++)
        out[b] = values[scale[b]];
    out[count] = 0;
    if (w->macro) {
        const uint8_t *macro = w->macro + row * w->macro_stride + k / MACRO_BLOCK;
        for (int64_t b = 0; b < count; b++)
            out[b] *= 1 + macro[b * block / MACRO_BLOCK] * (1 / 256.0f);
    }
}

#endif
