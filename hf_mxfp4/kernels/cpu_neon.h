/* SPDX-License-Identifier: Apache-2.0 */
/* NEON of 64-bit ARM: four registers for 16 floats. */

#define NAME(x) neon_##x
#define TARGET

typedef float32x4x4_t neon_vec;

#define EACH UNROLL for (int i = 0; i < 4; i++)

ALWAYS neon_vec neon_vec_zero(void)
{
    neon_vec to;
    EACH to.val[i] = vdupq_n_f32(0);
    return to;
}

ALWAYS neon_vec neon_vec_load(const float *from)
{
    neon_vec to;
    EACH to.val[i] = vld1q_f32(from + 4 * i);
    return to;
}

ALWAYS neon_vec neon_vec_mul(neon_vec a, neon_vec b)
{
    EACH a.val[i] = vmulq_f32(a.val[i], b.val[i]);
    return a;
}

ALWAYS neon_vec neon_vec_fma(neon_vec a, neon_vec b, neon_vec c)
{
    EACH c.val[i] = vfmaq_f32(c.val[i], a.val[i], b.val[i]);
    return c;
}

ALWAYS float neon_vec_sum(neon_vec a)
{
    return vaddvq_f32(vaddq_f32(vaddq_f32(a.val[0], a.val[1]), vaddq_f32(a.val[2], a.val[3])));
}

ALWAYS neon_vec neon_vec_pair(float s, float t)
{
    neon_vec to;
    EACH to.val[i] = vdupq_n_f32(i < 2 ? s : t);
    return to;
}

/* The upper half of a code's float32, looked up byte by byte; code 0 has the sign alone. */
ALWAYS neon_vec neon_values(uint8x16_t codes)
{
    static const uint8_t upper[16] = {0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,
                                      0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
    static const uint8_t lower[16] = {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0, 0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};
    uint8x16_t u = vqtbl1q_u8(vld1q_u8(upper), codes), l = vqtbl1q_u8(vld1q_u8(lower), codes);
    uint16x8_t first = vreinterpretq_u16_u8(vzip1q_u8(l, u)), last = vreinterpretq_u16_u8(vzip2q_u8(l, u));
    neon_vec to;
    to.val[0] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(first), 16));
    to.val[1] = vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(first), 16));
    to.val[2] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(last), 16));
    to.val[3] = vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(last), 16));
    return to;
}

ALWAYS void neon_vec_codes(const uint8_t *bytes, neon_vec *even, neon_vec *odd)
{
    uint8x16_t packed = vld1q_u8(bytes);
    *even = neon_values(vandq_u8(packed, vdupq_n_u8(15)));
    *odd = neon_values(vshrq_n_u8(packed, 4));
}

ALWAYS void neon_store4(char *out, float32x4_t a, const int type)
{
    if (type == F32)
        vst1q_f32((float *)out, a);
    else if (type == BF16) {
        uint32x4_t bits = vreinterpretq_u32_f32(a), even = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(even, vdupq_n_u32(0x7fff)));
        rounded = vbslq_u32(vceqq_f32(a, a), rounded, vdupq_n_u32(0x7fc00000));
        vst1_u16((uint16_t *)out, vshrn_n_u32(rounded, 16));
    } else
        vst1_u16((uint16_t *)out, vreinterpret_u16_f16(vcvt_f16_f32(a)));
}

ALWAYS void neon_vec_store(void *out, neon_vec even, neon_vec odd, const int type, const int exact)
{
    (void)exact;
    const int step = type == F32 ? 16 : 8;
    EACH
    {
        char *to = (char *)out + 2 * i * step;
        neon_store4(to, vzip1q_f32(even.val[i], odd.val[i]), type);
        neon_store4(to + step, vzip2q_f32(even.val[i], odd.val[i]), type);
    }
}

#undef EACH

#include "cpu_rows.h"
