/* SPDX-License-Identifier: Apache-2.0 */
/* Plain C. */

#define NAME(x) portable_##x
#define TARGET

typedef struct {
    float at[16];
} portable_vec;

#define EACH for (int i = 0; i < 16; i++)

ALWAYS portable_vec portable_vec_zero(void)
{
    return (portable_vec){{0}};
}

ALWAYS portable_vec portable_vec_load(const float *from)
{
    portable_vec to;
    memcpy(to.at, from, sizeof to.at);
    return to;
}

ALWAYS portable_vec portable_vec_mul(portable_vec a, portable_vec b)
{
    EACH a.at[i] *= b.at[i];
    return a;
}

ALWAYS portable_vec portable_vec_fma(portable_vec a, portable_vec b, portable_vec c)
{
    EACH c.at[i] += a.at[i] * b.at[i];
    return c;
}

ALWAYS float portable_vec_sum(portable_vec a)
{
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++)
            a.at[i] += a.at[i + half];
    return a.at[0];
}

ALWAYS portable_vec portable_vec_pair(float s, float t)
{
    portable_vec to;
    EACH to.at[i] = i < 8 ? s : t;
    return to;
}

/* E2M1 by its bits, which compilers turn into vectors as they do not a table: 1 e m less 1 where e is 0. */
ALWAYS float portable_value(uint32_t code)
{
    const uint32_t magnitude = code & 7, small = magnitude < 2 ? 0x3f800000 : 0;
    const float value = from_bits((magnitude << 22) + (126u << 23) + (small & 1u << 23)) - from_bits(small);
    return from_bits(to_bits(value) | (code & 8) << 28);
}

ALWAYS void portable_vec_codes(const uint8_t *bytes, portable_vec *even, portable_vec *odd)
{
    EACH even->at[i] = portable_value(bytes[i] & 15), odd->at[i] = portable_value(bytes[i] >> 4);
}

ALWAYS void portable_vec_store(void *out, portable_vec even, portable_vec odd, const int type, const int exact)
{
    (void)exact;
    float both[32];
    EACH both[2 * i] = even.at[i], both[2 * i + 1] = odd.at[i];
    for (int i = 0; i < 32; i++)
        store_as(out, type, i, both[i]);
}

#undef EACH

#include "cpu_rows.h"
