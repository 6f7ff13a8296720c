/* SPDX-License-Identifier: Apache-2.0 */
/* AVX2 with FMA and F16C: two registers for 16 floats. */

#define NAME(x) avx2_##x
#define TARGET __attribute__((target("avx2,fma,f16c")))

typedef struct {
    __m256 low, high;
} avx2_vec;

ALWAYS TARGET avx2_vec avx2_vec_zero(void)
{
    return (avx2_vec){_mm256_setzero_ps(), _mm256_setzero_ps()};
}

ALWAYS TARGET avx2_vec avx2_vec_load(const float *from)
{
    return (avx2_vec){_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
}

ALWAYS TARGET avx2_vec avx2_vec_mul(avx2_vec a, avx2_vec b)
{
    return (avx2_vec){_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}

ALWAYS TARGET avx2_vec avx2_vec_fma(avx2_vec a, avx2_vec b, avx2_vec c)
{
    return (avx2_vec){_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

ALWAYS TARGET float avx2_vec_sum(avx2_vec a)
{
    __m256 eight = _mm256_add_ps(a.low, a.high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}

ALWAYS TARGET avx2_vec avx2_vec_pair(float s, float t)
{
    return (avx2_vec){_mm256_set1_ps(s), _mm256_set1_ps(t)};
}

/* The two bytes of a code's bfloat16, which is the upper half of its float32; code 0 has the sign alone. */
ALWAYS TARGET avx2_vec avx2_values(__m128i codes)
{
    const __m128i upper = _mm_setr_epi8(0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, (char)0x80, (char)0xbf, (char)0xbf,
                                        (char)0xbf, (char)0xc0, (char)0xc0, (char)0xc0, (char)0xc0);
    const __m128i lower = _mm_setr_epi8(0, 0, (char)0x80, (char)0xc0, 0, 0x40, (char)0x80, (char)0xc0, 0, 0, (char)0x80,
                                        (char)0xc0, 0, 0x40, (char)0x80, (char)0xc0);
    __m128i u = _mm_shuffle_epi8(upper, codes), l = _mm_shuffle_epi8(lower, codes);
    __m256i first = _mm256_cvtepu16_epi32(_mm_unpacklo_epi8(l, u));
    __m256i last = _mm256_cvtepu16_epi32(_mm_unpackhi_epi8(l, u));
    return (avx2_vec){_mm256_castsi256_ps(_mm256_slli_epi32(first, 16)),
                      _mm256_castsi256_ps(_mm256_slli_epi32(last, 16))};
}

ALWAYS TARGET void avx2_vec_codes(const uint8_t *bytes, avx2_vec *even, avx2_vec *odd)
{
    const __m128i nibble = _mm_set1_epi8(15), packed = _mm_loadu_si128((const __m128i *)bytes);
    *even = avx2_values(_mm_and_si128(packed, nibble));
    *odd = avx2_values(_mm_and_si128(_mm_srli_epi16(packed, 4), nibble));
}

ALWAYS TARGET __m128i avx2_to_bf16(__m256 a)
{
    __m256i bits = _mm256_castps_si256(a), even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}

ALWAYS TARGET void avx2_store8(char *out, __m256 a, const int type)
{
    if (type == F32)
        _mm256_storeu_ps((float *)out, a);
    else if (type == BF16)
        _mm_storeu_si128((__m128i *)out, avx2_to_bf16(a));
    else
        _mm_storeu_si128((__m128i *)out, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}

ALWAYS TARGET void avx2_vec_store(void *out, avx2_vec even, avx2_vec odd, const int type, const int exact)
{
    (void)exact;
    const int step = type == F32 ? 32 : 16;
    for (int half = 0; half < 2; half++) {
        __m256 e = half ? even.high : even.low, o = half ? odd.high : odd.low;
        __m256 l = _mm256_unpacklo_ps(e, o), h = _mm256_unpackhi_ps(e, o);
        char *to = (char *)out + 2 * half * step;
        avx2_store8(to, _mm256_permute2f128_ps(l, h, 0x20), type);
        avx2_store8(to + step, _mm256_permute2f128_ps(l, h, 0x31), type);
    }
}

#include "cpu_rows.h"
