/* SPDX-License-Identifier: Apache-2.0 */
/* Products and decoding of rows in float32, written once for every instruction set.

   Included again and again; before each time the includer defines NAME(x), a name of its own for x, TARGET, the
   compiler's attribute, and these for 16 floats at a time:

   vec                            16 floats
   vec_zero() vec_load(p) vec_mul(a, b) vec_fma(a, b, c)  [a * b + c]  vec_sum(a)
   vec_pair(s, t)                 s in the first 8, t in the last 8
   vec_codes(bytes, &even, &odd)  the codes of 16 bytes, those in low and those in high nibbles
   vec_store(out, even, odd, type, exact)  32 values in natural order, as a dtype; `exact`: bfloat16 holds them
 */

ALWAYS TARGET void NAME(scaled)(const uint8_t *packed, int64_t left, const float *scales, const int e8m0,
                                NAME(vec) *even, NAME(vec) *odd)
{
    uint8_t last[16] = {0};
    if (left < 32)
        packed = memcpy(last, packed, 8);
    NAME(vec_codes)(packed, even, odd);
    NAME(vec) scale = NAME(vec_pair)(scales[0], scales[e8m0 ? 0 : 1]);
    *even = NAME(vec_mul)(*even, scale), *odd = NAME(vec_mul)(*odd, scale);
}

ALWAYS TARGET void NAME(product)(const struct weight *w, int64_t row, const float *x, int64_t stride, const int tokens,
                                 const int e8m0, float *sums)
{
    const int block = e8m0 ? 32 : 16;
    const uint8_t *packed = w->packed + row * w->packed_stride;
    float scales[SPAN / 16 + 1];
    NAME(vec) total[4][2], even, odd;
    UNROLL for (int t = 0; t < tokens; t++)
        total[t][0] = total[t][1] = NAME(vec_zero)();
    for (int64_t first = 0; first < w->k; first += SPAN) {
        const int64_t span = w->k - first < SPAN ? w->k - first : SPAN;
        block_scales(w, row, first, span, scales);
        for (int64_t i = 0; i < span; i += 32) {
            NAME(scaled)(packed + (first + i) / 2, span - i, scales + i / block, e8m0, &even, &odd);
            const float *part = x + first + i;
            UNROLL for (int t = 0; t < tokens; t++) {
                total[t][0] = NAME(vec_fma)(even, NAME(vec_load)(part + t * stride), total[t][0]);
                total[t][1] = NAME(vec_fma)(odd, NAME(vec_load)(part + t * stride + 16), total[t][1]);
            }
        }
    }
    UNROLL for (int t = 0; t < tokens; t++)
        sums[t * ROWS] = NAME(vec_sum)(total[t][0]) + NAME(vec_sum)(total[t][1]);
}

static TARGET void NAME(linear_f32)(const struct weight *w, int64_t row, const float *x, int64_t stride, int tokens,
                                    float *sums)
{
    int t = 0;
    for (; t + 4 <= tokens; t += 4)
        if (w->e8m0)
            NAME(product)(w, row, x + t * stride, stride, 4, 1, sums + t * ROWS);
        else
            NAME(product)(w, row, x + t * stride, stride, 4, 0, sums + t * ROWS);
    for (; t < tokens; t++)
        if (w->e8m0)
            NAME(product)(w, row, x + t * stride, stride, 1, 1, sums + t * ROWS);
        else
            NAME(product)(w, row, x + t * stride, stride, 1, 0, sums + t * ROWS);
}

/* Brings outliers in: `values` [count] at `columns`, of rows that end at `ends`. `x` is [k] for one token, else
   [16 tokens each][k][16]. */
static TARGET void NAME(outliers)(const float *values, const int32_t *columns, const int32_t *ends, int rows,
                                  const float *x, int64_t k, int tokens, float *sums)
{
    for (int i = 0, from = 0; i < rows; from = ends[i++]) {
        if (tokens == 1) {
            float sum[4] = {0};
            int e = from;
            for (; e + 4 <= ends[i]; e += 4)
                UNROLL for (int j = 0; j < 4; j++) sum[j] += values[e + j] * x[columns[e + j]];
            for (; e < ends[i]; e++)
                sum[0] += values[e] * x[columns[e]];
            sums[i] += sum[0] + sum[1] + (sum[2] + sum[3]);
            continue;
        }
        if (from < ends[i])
            for (int t = 0; t < tokens; t += 16) {
                NAME(vec) total = NAME(vec_zero)();
                for (int e = from; e < ends[i]; e++) {
                    NAME(vec) value = NAME(vec_pair)(values[e], values[e]);
                    total = NAME(vec_fma)(value, NAME(vec_load)(x + (t * k + columns[e] * (int64_t)16)), total);
                }
                float each[16];
                memcpy(each, &total, sizeof each);
                for (int j = 0; j < 16 && t + j < tokens; j++)
                    sums[(t + j) * ROWS + i] += each[j];
            }
    }
}

/* `rows` sums and their bias as a dtype. */
static TARGET void NAME(finish)(const float *sums, const float *bias, int rows, void *out, int type)
{
    if (rows == ROWS && type == BF16)
        for (int i = 0; i < ROWS; i++)
            store_as(out, BF16, i, sums[i] + bias[i]);
    else
        for (int i = 0; i < rows; i++)
            store_as(out, type, i, sums[i] + bias[i]);
}

ALWAYS TARGET void NAME(decode_as)(const struct weight *w, int64_t row, void *out, const int type, const int exact,
                                   const int e8m0)
{
    const int block = e8m0 ? 32 : 16, bytes = type == F32 ? 4 : 2;
    const uint8_t *packed = w->packed + row * w->packed_stride;
    float scales[SPAN / 16 + 1];
    float last[32];
    NAME(vec) even, odd, global = NAME(vec_zero)();
    if (w->global_scale)
        global = NAME(vec_pair)(*w->global_scale, *w->global_scale);
    for (int64_t first = 0; first < w->k; first += SPAN) {
        const int64_t span = w->k - first < SPAN ? w->k - first : SPAN;
        block_scales(w, row, first, span, scales);
        for (int64_t i = 0; i < span; i += 32) {
            NAME(scaled)(packed + (first + i) / 2, span - i, scales + i / block, e8m0, &even, &odd);
            if (w->global_scale)
                even = NAME(vec_mul)(even, global), odd = NAME(vec_mul)(odd, global);
            char *to = (char *)out + (first + i) * bytes;
            if (span - i >= 32)
                NAME(vec_store)(to, even, odd, type, exact);
            else {
                NAME(vec_store)(last, even, odd, type, exact);
                memcpy(to, last, 16 * bytes);
            }
        }
    }
}

static TARGET void NAME(decode)(const struct weight *w, int64_t row, void *out, int type)
{
    const int exact = type == BF16 && exact_in_bf16(w);
#define AS(e8m0)                                                    \
    (exact          ? NAME(decode_as)(w, row, out, BF16, 1, e8m0)   \
     : type == BF16 ? NAME(decode_as)(w, row, out, BF16, 0, e8m0)   \
     : type == F16  ? NAME(decode_as)(w, row, out, F16, 0, e8m0)    \
                    : NAME(decode_as)(w, row, out, F32, 0, e8m0))
    w->e8m0 ? AS(1) : AS(0);
#undef AS
}

#undef NAME
#undef TARGET
