/* SPDX-License-Identifier: Apache-2.0 */
/* AVX-512: one register for 16 floats; and products with bfloat16 x by VDPBF16PS.

   The latter look codes up as bfloat16, multiply and add them unscaled, and bring scales in afterwards. For that a lane
   of the sum must belong to one block: a chunk of 16 blocks of a row has a block in each lane. x is put in the order in
   which the codes then come out (`order_bf16`), once per call.
 */

#define NAME(x) avx512_##x
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))

typedef __m512 avx512_vec;

ALWAYS TARGET __m512 avx512_vec_zero(void)
{
    return _mm512_setzero_ps();
}

ALWAYS TARGET __m512 avx512_vec_load(const float *from)
{
    return _mm512_loadu_ps(from);
}

ALWAYS TARGET __m512 avx512_vec_mul(__m512 a, __m512 b)
{
    return _mm512_mul_ps(a, b);
}

ALWAYS TARGET __m512 avx512_vec_fma(__m512 a, __m512 b, __m512 c)
{
    return _mm512_fmadd_ps(a, b, c);
}

ALWAYS TARGET float avx512_vec_sum(__m512 a)
{
    return _mm512_reduce_add_ps(a);
}

ALWAYS TARGET __m512 avx512_vec_pair(float s, float t)
{
    return _mm512_mask_mov_ps(_mm512_set1_ps(s), 0xff00, _mm512_set1_ps(t));
}

ALWAYS TARGET void avx512_vec_codes(const uint8_t *bytes, __m512 *even, __m512 *odd)
{
    const __m512 table = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    __m512i packed = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes));
    *even = _mm512_permutexvar_ps(packed, table); /* of an index 4 bits are looked at */
    *odd = _mm512_permutexvar_ps(_mm512_srli_epi32(packed, 4), table);
}

/* The upper halves of its bits become those of bfloat16; by hand, as VCVTNEPS2BF16 flushes subnormal numbers. */
ALWAYS TARGET __m512i avx512_round(__m512 a)
{
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff)));
    return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
}

ALWAYS TARGET void avx512_vec_store(void *out, __m512 even, __m512 odd, const int type, const int exact)
{
    if (type == BF16) {
        __m512i low = exact ? _mm512_castps_si512(even) : avx512_round(even);
        __m512i high = exact ? _mm512_castps_si512(odd) : avx512_round(odd);
        _mm512_storeu_si512(out, _mm512_mask_mov_epi16(_mm512_srli_epi32(low, 16), 0xaaaaaaaa, high));
        return;
    }
    const __m512i order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    __m512 low = _mm512_permutex2var_ps(even, order, odd);
    __m512 high = _mm512_permutex2var_ps(even, _mm512_add_epi32(order, _mm512_set1_epi32(8)), odd);
    if (type == F32) {
        _mm512_storeu_ps((float *)out, low);
        _mm512_storeu_ps((float *)out + 16, high);
    } else {
        _mm256_storeu_si256((__m256i *)out, _mm512_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT));
        _mm256_storeu_si256((__m256i *)out + 1, _mm512_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT));
    }
}

#include "cpu_rows.h"

/* --- bfloat16 ----------------------------------------------------------------------------------------------------- */

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")))

/* Weights in a chunk: 16 blocks, of 4 or 2 dwords each. */
#define CHUNK(e8m0) ((e8m0) ? 512 : 256)

/* VDPBF16PS takes subnormal numbers for zero, and sums are formed before they are scaled. With |x| in [2^-100, 2^100]
   nothing it forms is subnormal, and nothing overflows. */
#define SMALLEST 0x0d80
#define LARGEST 0x7180

/* Chunk's block in a lane of the sum, as `avx512_lanes` leaves them. */
ALWAYS int avx512_block(int lane, const int e8m0)
{
    return e8m0 ? 4 * (lane % 4) + lane / 4 : 8 * (lane / 2 % 2) + 2 * (lane / 4) + lane % 2;
}

/* x of a chunk, viewed as dwords [dword of the block][nibble p][lane] of two bfloat16 numbers: those whose codes are
   nibble p of the lower and of the upper half of a packed dword. Padded with zeros. */
static TARGET int avx512_order_bf16(const struct weight *w, const uint16_t *x, uint16_t *out)
{
    const int chunk = CHUNK(w->e8m0), each = chunk / 32;
    uint16_t place[32];
    for (int i = 0; i < 32; i++)
        place[i] = (uint16_t)(8 * (i / 8) + 4 * (i % 2) + i / 2 % 4);
    const __m512i pairs = _mm512_loadu_si512(place);
    uint32_t dwords[256];
    __mmask32 bad = 0;
    for (int64_t first = 0; first < w->k; first += chunk, out += chunk) {
        for (int i = 0; i < chunk; i += 32) {
            const int64_t left = w->k - first - i;
            __mmask32 mask = left >= 32 ? 0xffffffff : left > 0 ? (1u << left) - 1 : 0;
            __m512i part = _mm512_maskz_loadu_epi16(mask, x + first + i);
            __m512i magnitude = _mm512_and_si512(part, _mm512_set1_epi16(0x7fff));
            __m512i above = _mm512_sub_epi16(magnitude, _mm512_set1_epi16(SMALLEST));
            bad |= _mm512_mask_cmpgt_epu16_mask(_mm512_test_epi16_mask(magnitude, magnitude), above,
                                                _mm512_set1_epi16(LARGEST - SMALLEST));
            _mm512_storeu_si512(dwords + i / 2, _mm512_permutexvar_epi16(pairs, part));
        }
        if (bad)
            return 0;
        for (int lane = 0; lane < 16; lane++)
            for (int i = 0; i < each; i++)
                memcpy(out + 2 * (16 * i + lane), dwords + avx512_block(lane, w->e8m0) * each + i, 4);
    }
    return 1;
}

ALWAYS TARGET __m512i avx512_load_bytes(const uint8_t *from, int64_t left, const int full)
{
    if (full || left >= 64)
        return _mm512_loadu_si512(from);
    return _mm512_maskz_loadu_epi8(left > 0 ? ((__mmask64)1 << left) - 1 : 0, from);
}

/* A chunk of a row: codes[r], lane by lane, has dword r of the lane's block. `left`: bytes from here to the row's end. */
ALWAYS TARGET void avx512_lanes(const uint8_t *packed, int64_t left, const int full, const int e8m0, __m512i codes[4])
{
    __m512i a = avx512_load_bytes(packed, left, full), b = avx512_load_bytes(packed + 64, left - 64, full);
    if (e8m0) {
        __m512i c = avx512_load_bytes(packed + 128, left - 128, full);
        __m512i d = avx512_load_bytes(packed + 192, left - 192, full);
        __m512i ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
        codes[0] = _mm512_unpacklo_epi64(ab, cd), codes[1] = _mm512_unpackhi_epi64(ab, cd);
        ab = _mm512_unpackhi_epi32(a, b), cd = _mm512_unpackhi_epi32(c, d);
        codes[2] = _mm512_unpacklo_epi64(ab, cd), codes[3] = _mm512_unpackhi_epi64(ab, cd);
    } else {
        __m512 low = _mm512_castsi512_ps(a), high = _mm512_castsi512_ps(b);
        codes[0] = _mm512_castps_si512(_mm512_shuffle_ps(low, high, 0x88));
        codes[1] = _mm512_castps_si512(_mm512_shuffle_ps(low, high, 0xdd));
    }
}

/* The scales of a chunk's blocks, lane by lane; `left`: blocks from here to the row's end. */
ALWAYS TARGET __m512 avx512_scales(const uint8_t *scale, const uint8_t *macro, int64_t left, const int full,
                                   const int e8m0)
{
    const __mmask16 mask = full || left >= 16 ? 0xffff : (__mmask16)((1 << left) - 1);
    __m128i bytes = full ? _mm_loadu_si128((const __m128i *)scale) : _mm_maskz_loadu_epi8(mask, scale);
    if (e8m0) {
        bytes = _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
        __m512i wide = _mm512_cvtepu8_epi32(bytes), bits = _mm512_slli_epi32(wide, 23);
        bits = _mm512_mask_mov_epi32(bits, _mm512_testn_epi32_mask(wide, wide), _mm512_set1_epi32(0x00400000));
        __mmask16 nan = _mm512_cmpeq_epi32_mask(wide, _mm512_set1_epi32(255));
        __m512 value = _mm512_castsi512_ps(_mm512_mask_mov_epi32(bits, nan, _mm512_set1_epi32(0x7fc00000)));
        if (!macro)
            return value;
        __m128i each = _mm_maskz_loadu_epi8(full || left >= 16 ? 15 : (__mmask16)((1 << (left + 3) / 4) - 1), macro);
        __m128 factor = _mm_cvtepi32_ps(_mm_cvtepu8_epi32(each));
        factor = _mm_fmadd_ps(factor, _mm_set1_ps(1 / 256.0f), _mm_set1_ps(1));
        return _mm512_mul_ps(value, _mm512_broadcast_f32x4(factor));
    }
    bytes = _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    /* The same bits as float16 have an exponent bias of 15, not 7. */
    __m256i half = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7), _mm256_set1_epi16(~0x4000));
    __m512 value = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256));
    const __m128i largest = _mm_set1_epi8(127);
    __mmask16 nan = _mm_cmpeq_epi8_mask(_mm_and_si128(bytes, largest), largest);
    return _mm512_mask_mov_ps(value, nan, _mm512_set1_ps(NAN));
}

ALWAYS TARGET void avx512_chunk(const struct weight *w, int64_t row, int64_t first, const int64_t *ahead, const int full,
                                const uint16_t *x, int64_t stride, const int rows, const int tokens, const int e8m0,
                                __m512 total[][8])
{
    const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(
        0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, (short)0x8000, (short)0xbf00, (short)0xbf80,
        (short)0xbfc0, (short)0xc000, (short)0xc040, (short)0xc080, (short)0xc0c0)); /* twice: 5 bits are an index */
    const int block = e8m0 ? 32 : 16, dwords = e8m0 ? 4 : 2;
    const int chains = tokens == 1 ? dwords : 1; /* sums in flight: a product takes 6 cycles, two begin in one */
    __m512i codes[2][4];
    __m512 part[2][8][4];
    UNROLL for (int i = 0; i < rows; i++)
    {
        const uint8_t *packed = w->packed + (row + i) * w->packed_stride + first / 2;
        const uint8_t *scale = w->scale + (row + i) * w->scale_stride + first / block;
        for (int line = 0; line < CHUNK(e8m0) / 2; line += 64)
            _mm_prefetch((const char *)((uintptr_t)packed + line + ahead[0]), _MM_HINT_T0);
        _mm_prefetch((const char *)((uintptr_t)scale + ahead[1]), _MM_HINT_T0);
        avx512_lanes(packed, (w->k - first) / 2, full, e8m0, codes[i]);
        UNROLL for (int t = 0; t < tokens; t++)
            UNROLL for (int c = 0; c < chains; c++) part[i][t][c] = _mm512_setzero_ps();
    }
    UNROLL for (int d = 0; d < dwords; d++)
        UNROLL for (int nibble = 0; nibble < 4; nibble++)
        {
            __m512bh values[2];
            UNROLL for (int i = 0; i < rows; i++)
            {
                __m512i index = _mm512_srli_epi16(codes[i][d], 4 * nibble);
                values[i] = (__m512bh)_mm512_permutexvar_epi16(index, table);
            }
            UNROLL for (int t = 0; t < tokens; t++)
            {
                __m512bh own = (__m512bh)_mm512_loadu_si512(x + t * stride + first + 32 * (4 * d + nibble));
                UNROLL for (int i = 0; i < rows; i++)
                    part[i][t][d % chains] = _mm512_dpbf16_ps(part[i][t][d % chains], values[i], own);
            }
        }
    UNROLL for (int i = 0; i < rows; i++)
    {
        const uint8_t *scale = w->scale + (row + i) * w->scale_stride + first / block;
        const uint8_t *macro = w->macro ? w->macro + (row + i) * w->macro_stride + first / MACRO_BLOCK : NULL;
        __m512 scales = avx512_scales(scale, macro, (w->k - first) / block, full, e8m0);
        UNROLL for (int t = 0; t < tokens; t++)
        {
            UNROLL for (int c = 1; c < chains; c++) part[i][t][0] = _mm512_add_ps(part[i][t][0], part[i][t][c]);
            total[i][t] = _mm512_fmadd_ps(part[i][t][0], scales, total[i][t]);
        }
    }
}

/* Adds the product with weights [first, end) of `rows` rows (1 or 2) to `total`. `ahead`: how many bytes later
   the codes and scales lie that are needed next; hardware does not foresee jumps from row to row. */
ALWAYS TARGET void avx512_tile(const struct weight *w, int64_t row, int64_t first, int64_t end, const int64_t *ahead,
                               const uint16_t *x, int64_t stride, const int rows, const int tokens, const int e8m0,
                               __m512 total[][8])
{
    __m512 own[2][8];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int t = 0; t < tokens; t++) own[i][t] = total[i][t];
    for (; first + CHUNK(e8m0) <= end; first += CHUNK(e8m0))
        avx512_chunk(w, row, first, ahead, 1, x, stride, rows, tokens, e8m0, own);
    if (first < end) /* the last of a row */
        avx512_chunk(w, row, first, ahead, 0, x, stride, rows, tokens, e8m0, own);
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int t = 0; t < tokens; t++) total[i][t] = own[i][t];
}

/* The sums of 16 registers, in their order. */
ALWAYS TARGET __m512 avx512_sums(const __m512 rows[][8], const int t)
{
    __m512 two[8], four[4], eight[2];
    UNROLL for (int i = 0; i < 8; i++)
    {
        __m512 a = rows[2 * i][t], b = rows[2 * i + 1][t];
        two[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    UNROLL for (int i = 0; i < 4; i++)
    {
        __m512d a = _mm512_castps_pd(two[2 * i]), b = _mm512_castps_pd(two[2 * i + 1]);
        four[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    UNROLL for (int i = 0; i < 2; i++)
    {
        __m512 a = four[2 * i], b = four[2 * i + 1];
        eight[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    return _mm512_add_ps(_mm512_shuffle_f32x4(eight[0], eight[1], 0x88),
                         _mm512_shuffle_f32x4(eight[0], eight[1], 0xdd));
}

/* As many columns at a time as leave x in the first cache: 32 KB of it. */
ALWAYS TARGET void avx512_rows(const struct weight *w, int64_t row, int rows, const uint16_t *x, int64_t stride,
                               const int tokens, const int e8m0, float *sums)
{
    __m512 total[ROWS][8];
    const int64_t span = 16384 / tokens;
    for (int i = 0; i < ROWS; i++)
        UNROLL for (int t = 0; t < tokens; t++) total[i][t] = _mm512_setzero_ps();
    for (int64_t first = 0; first < w->k; first += span) {
        const int64_t end = w->k - first < span ? w->k : first + span;
        const int last = end == w->k, block = e8m0 ? 32 : 16;
        const int64_t ahead[2] = {last ? ROWS * w->packed_stride - first / 2 : span / 2,
                                  last ? ROWS * w->scale_stride - first / block : span / block};
        int i = 0;
        for (; i + 2 <= rows; i += 2)
            avx512_tile(w, row + i, first, end, ahead, x, stride, 2, tokens, e8m0, total + i);
        if (i < rows)
            avx512_tile(w, row + i, first, end, ahead, x, stride, 1, tokens, e8m0, total + i);
    }
    UNROLL for (int t = 0; t < tokens; t++)
        _mm512_storeu_ps(sums + t * ROWS, avx512_sums((const __m512(*)[8])total, t));
}

#define ROWS_OF(tokens) \
    (w->e8m0 ? avx512_rows(w, row, rows, x, stride, tokens, 1, sums) \
             : avx512_rows(w, row, rows, x, stride, tokens, 0, sums))

static TARGET void avx512_linear_bf16(const struct weight *w, int64_t row, int rows, const uint16_t *x, int64_t stride,
                                      int tokens, float *sums)
{
    while (tokens) {
        const int now = tokens >= 8 ? 8 : tokens >= 4 ? 4 : tokens >= 2 ? 2 : 1;
        now == 8 ? ROWS_OF(8) : now == 4 ? ROWS_OF(4) : now == 2 ? ROWS_OF(2) : ROWS_OF(1);
        x += now * stride, sums += now * ROWS, tokens -= now;
    }
}

#undef ROWS_OF
#undef TARGET
