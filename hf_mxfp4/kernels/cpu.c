/* SPDX-License-Identifier: Apache-2.0 */
/* Products with packed weights and their decoding on a CPU, called on raw pointers: no part of torch is linked.

   Products of codes and scales are exact; sums are formed in float32 in any order. Twins: `reference.linear` and
   `reference.dequantize`.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "cpu.h"

#ifdef X86
#include <immintrin.h>
#endif
#ifdef NEON
#include <arm_neon.h>
#endif

#include "cpu_portable.h"
#ifdef X86
#include "cpu_avx2.h"
#include "cpu_avx512.h"
#endif
#ifdef NEON
#include "cpu_neon.h"
#endif

/* --- instruction sets, best first --------------------------------------------------------------------------------- */

static int always(void)
{
    return 1;
}

#ifdef X86
static int has_avx2(void) /* and F16C, which is older */
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static int has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

static int has_avx512_bf16(void)
{
    return has_avx512() && __builtin_cpu_supports("avx512bf16");
}
#endif

static const struct path {
    const char *name;
    int (*supported)(void);
    f32_kernel linear_f32;
    decode_kernel decode;
    outlier_kernel outliers;
    finish_kernel finish;
    bf16_order order_bf16; /* NULL: bfloat16 goes through float32 */
    bf16_kernel linear_bf16;
} PATHS[] = {
#ifdef X86
    {"avx512_bf16", has_avx512_bf16, avx512_linear_f32, avx512_decode, avx512_outliers, avx512_finish, avx512_order_bf16, avx512_linear_bf16},
    {"avx512", has_avx512, avx512_linear_f32, avx512_decode, avx512_outliers, avx512_finish, NULL, NULL},
    {"avx2", has_avx2, avx2_linear_f32, avx2_decode, avx2_outliers, avx2_finish, NULL, NULL},
#endif
#ifdef NEON
    {"neon", always, neon_linear_f32, neon_decode, neon_outliers, neon_finish, NULL, NULL},
#endif
    {"portable", always, portable_linear_f32, portable_decode, portable_outliers, portable_finish, NULL, NULL},
};

#define PATH_COUNT ((int)(sizeof PATHS / sizeof *PATHS))

/* --- subnormal numbers -------------------------------------------------------------------------------------------- */

/* Threads may flush subnormal numbers (torch.set_flush_denormal); the smallest scales and float16 need them. */
static uint64_t keep_subnormals(void)
{
#if defined(X86)
    uint32_t before = _mm_getcsr();
    _mm_setcsr(before & ~0x8040u);
    return before;
#elif defined(NEON)
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(before & ~(1ull << 24)));
    return before;
#else
    return 0;
#endif
}

static void restore(uint64_t before)
{
#if defined(X86)
    _mm_setcsr((uint32_t)before);
#elif defined(NEON)
    __asm__ volatile("msr fpcr, %0" : : "r"(before));
#else
    (void)before;
#endif
}

/* --- threads ------------------------------------------------------------------------------------------------------ */

/* GOMP_parallel of the OpenMP runtime that torch has loaded, or NULL: a second one would fight it for the cores. */
static void (*parallel)(void (*)(void *), void *, unsigned, unsigned);

struct job {
    struct weight w;
    const struct path *path;
    int64_t next; /* rows handed out so far */
    /* decode */
    char *out;
    int64_t out_stride, first_column; /* bytes; columns are the weight's from here on (outliers are not cut) */
    int out_type;
    /* linear */
    const char *x;
    const void *bias;
    int64_t x_stride, padded; /* elements */
    int x_type, bias_type, tokens, direct; /* the first `direct` tokens of `order` go through linear_bf16 */
    int *order;
    uint16_t *x_bf16;
    float *x_f32, *x_outliers, *sums; /* x_outliers as outlier_kernel takes it; sums: [thread][tokens][ROWS] */
    int64_t threads_seen;
    int damaged; /* an outlier lies outside of the matrix */
};

#ifdef __GNUC__
#define FETCH_ADD(counter, value) __atomic_fetch_add(&(counter), value, __ATOMIC_RELAXED)
#else /* one thread */
#define FETCH_ADD(counter, value) ((counter) += (value), (counter) - (value))
#endif

static void run(struct job *job, void (*work)(void *), int64_t threads)
{
    if (threads > 1 && parallel)
        parallel(work, job, (unsigned)threads, 0);
    else
        work(job);
}

/* --- decode ------------------------------------------------------------------------------------------------------- */

/* Entries [*from, *to) of a row's outliers, checked to exist: they may come from a damaged file. */
static void entries_of(struct job *job, int64_t row, int64_t *from, int64_t *to)
{
    *from = job->w.offsets[row], *to = job->w.offsets[row + 1];
    if (*from < 0 || *to > job->w.value_count)
        job->damaged = 1, *from = *to = 0;
}

static int64_t column_of(const struct weight *w, int64_t entry)
{
    return w->column_bytes == 2 ? ((const uint16_t *)w->columns)[entry] : ((const int32_t *)w->columns)[entry];
}

static void decode_work(void *data)
{
    struct job *job = data;
    const struct weight *w = &job->w;
    uint64_t before = keep_subnormals();
    for (int64_t row; (row = FETCH_ADD(job->next, ROWS)) < w->n;)
        for (int64_t end = row + ROWS < w->n ? row + ROWS : w->n; row < end; row++) {
            char *out = job->out + row * job->out_stride;
            job->path->decode(w, row, out, job->out_type);
            int64_t e = 0, last = 0;
            if (w->values)
                entries_of(job, row, &e, &last);
            for (; e < last; e++) {
                const int64_t column = column_of(w, e) - job->first_column;
                if (column >= 0 && column < w->k)
                    store_as(out, job->out_type, column, load_as(w->values, w->value_type, e));
            }
        }
    restore(before);
}

/* --- linear ------------------------------------------------------------------------------------------------------- */

/* A row of x as float32, 32 at a time: 16 with even k, 16 with odd k. Padded with zeros. */
static void order_f32(const struct job *job, const char *x, float *out)
{
    const int64_t k = job->w.k;
    for (int64_t first = 0; first < k; first += 32)
        for (int i = 0; i < 16; i++) {
            const int inside = first + 2 * i < k; /* k is even */
            out[first + i] = inside ? load_as(x, job->x_type, first + 2 * i) : 0;
            out[first + 16 + i] = inside ? load_as(x, job->x_type, first + 2 * i + 1) : 0;
        }
}

/* Rows [start, start + rows): outliers onto sums. Checked to exist: they may come from a damaged file. */
static void add_outliers(struct job *job, int64_t start, int rows, float *sums)
{
    const struct weight *w = &job->w;
    const int32_t *offsets = w->offsets + start;
    float values[PIECE];
    int32_t columns[PIECE], ends[ROWS];
    int wrong = offsets[0] < 0 || offsets[rows] > w->value_count;
    for (int i = 0; i < rows; i++)
        wrong |= offsets[i] > offsets[i + 1];
    for (int64_t from = offsets[0]; !wrong && from < offsets[rows]; from += PIECE) {
        const int count = (int)(offsets[rows] - from < PIECE ? offsets[rows] - from : PIECE);
        uint32_t last = 0; /* of all columns; negative ones are large */
        for (int e = 0; e < count; e++) {
            columns[e] = (int32_t)column_of(w, from + e);
            last = (uint32_t)columns[e] > last ? (uint32_t)columns[e] : last;
        }
        if ((wrong = last >= (uint64_t)w->k))
            break;
        for (int e = 0; e < count; e++)
            values[e] = load_as(w->values, w->value_type, from + e);
        for (int i = 0; i < rows; i++) {
            const int64_t end = offsets[i + 1] - from;
            ends[i] = (int32_t)(end < 0 ? 0 : end < count ? end : count);
        }
        job->path->outliers(values, columns, ends, rows, job->x_outliers, w->k, job->tokens, sums);
    }
    if (wrong)
        job->damaged = 1;
}

static void linear_work(void *data)
{
    struct job *job = data;
    const struct weight *w = &job->w;
    const int tokens = job->tokens, direct = job->direct, size = job->x_type == F32 ? 4 : 2;
    const float global = w->global_scale ? *w->global_scale : 1;
    float *sums = job->sums + ROWS * tokens * FETCH_ADD(job->threads_seen, 1), bias[ROWS] = {0};
    uint64_t before = keep_subnormals();
    for (int64_t start; (start = FETCH_ADD(job->next, ROWS)) < w->n;) {
        const int rows = (int)(w->n - start < ROWS ? w->n - start : ROWS);
        if (direct)
            job->path->linear_bf16(w, start, rows, job->x_bf16, job->padded, direct, sums);
        for (int i = 0; i < rows && direct < tokens; i++)
            job->path->linear_f32(w, start + i, job->x_f32, job->padded, tokens - direct, sums + direct * ROWS + i);
        for (int i = 0; i < tokens * ROWS; i++)
            sums[i] *= global;
        if (w->values)
            add_outliers(job, start, rows, sums);
        for (int i = 0; i < rows && job->bias; i++)
            bias[i] = load_as(job->bias, job->bias_type, start + i);
        for (int slot = 0; slot < tokens; slot++)
            job->path->finish(sums + slot * ROWS, bias, rows, job->out + (job->order[slot] * w->n + start) * size,
                              job->x_type);
    }
    restore(before);
}

static int linear(struct job *job, int64_t threads)
{
    const struct weight *w = &job->w;
    const int64_t tokens = job->tokens, padded = job->padded = (w->k + 511) / 512 * 512 + 32;
    const int size = job->x_type == F32 ? 4 : 2, bf16 = job->x_type == BF16 && job->path->order_bf16;
    const size_t f32_bytes = (size_t)(tokens * padded * 4), bf16_bytes = bf16 ? (size_t)(tokens * padded * 2) : 0;
    const int64_t groups = !w->values ? 0 : tokens == 1 ? 1 : (tokens + 15) / 16 * 16;
    const size_t sums_bytes = (size_t)(threads * ROWS * tokens * 4), outliers_bytes = (size_t)(groups * w->k * 4);
    char *allocated =
        malloc(f32_bytes + bf16_bytes + sums_bytes + outliers_bytes + (size_t)tokens * sizeof(int) + 63);
    if (!allocated)
        return -1;
    char *scratch = (char *)(((uintptr_t)allocated + 63) & ~(uintptr_t)63); /* no load crosses a cache line */
    job->x_f32 = (float *)scratch;
    job->x_bf16 = (uint16_t *)(scratch + f32_bytes);
    job->sums = (float *)(scratch + f32_bytes + bf16_bytes);
    job->x_outliers = (float *)(scratch + f32_bytes + bf16_bytes + sums_bytes);
    job->order = (int *)(scratch + f32_bytes + bf16_bytes + sums_bytes + outliers_bytes);
    int other = 0;
    uint64_t before = keep_subnormals();
    for (int t = 0; t < tokens; t++) {
        const char *x = job->x + t * job->x_stride * size;
        if (bf16 && job->path->order_bf16(w, (const uint16_t *)x, job->x_bf16 + job->direct * padded))
            job->order[job->direct++] = t;
        else {
            order_f32(job, x, job->x_f32 + other * padded);
            job->order[tokens - 1 - other++] = t; /* from the end on, put right below */
        }
    }
    restore(before);
    for (int i = job->direct, j = (int)tokens - 1; i < j; i++, j--) {
        int t = job->order[i];
        job->order[i] = job->order[j], job->order[j] = t;
    }
    for (int slot = 0; slot < tokens && groups; slot++) {
        const char *x = job->x + job->order[slot] * job->x_stride * size;
        float *to = job->x_outliers + slot / 16 * 16 * w->k + slot % 16;
        for (int64_t i = 0; i < w->k; i++)
            to[tokens == 1 ? i : 16 * i] = load_as(x, job->x_type, i);
    }
    run(job, linear_work, threads);
    free(allocated);
    return 0;
}

/* --- Python ------------------------------------------------------------------------------------------------------- */

#define WEIGHT_ARGUMENTS 16 /* what `_Weight` of cpu.py gives for a weight, path and threads */

static PyObject *damaged(void)
{
    return PyErr_Format(PyExc_ValueError, "outliers: offsets or columns point outside of the matrix and its outliers. "
                                          "The checkpoint is damaged; download it again.");
}

static int64_t number(PyObject *const *arguments, int index)
{
    return PyLong_AsLongLong(arguments[index]);
}

static void *address(PyObject *const *arguments, int index)
{
    return PyLong_AsVoidPtr(arguments[index]);
}

static int64_t weight_of(struct job *job, PyObject *const *a)
{
    struct weight *w = &job->w;
    *job = (struct job){0};
    w->packed = address(a, 0), w->scale = address(a, 1), w->macro = address(a, 2);
    w->packed_stride = number(a, 3), w->scale_stride = number(a, 4), w->macro_stride = number(a, 5);
    w->n = number(a, 6), w->k = number(a, 7), w->e8m0 = (int)number(a, 8);
    w->global_scale = address(a, 9);
    w->values = address(a, 10), w->columns = address(a, 11), w->offsets = address(a, 12);
    const int types = (int)number(a, 13); /* values' dtype + 8 * bytes of a column + 64 * path */
    w->value_type = types & 7, w->column_bytes = types >> 3 & 7;
    job->path = &PATHS[types >> 6];
    w->value_count = number(a, 14);
    return number(a, 15);
}

static PyObject *py_linear(PyObject *module, PyObject *const *a, Py_ssize_t count)
{
    struct job job;
    (void)module;
    if (count != WEIGHT_ARGUMENTS + 7)
        return PyErr_Format(PyExc_TypeError, "linear: %zd arguments", count);
    int64_t threads = weight_of(&job, a);
    a += WEIGHT_ARGUMENTS;
    job.x = address(a, 0), job.x_type = (int)number(a, 1), job.x_stride = number(a, 2), job.tokens = (int)number(a, 3);
    job.out = address(a, 4), job.bias = address(a, 5), job.bias_type = (int)number(a, 6);
    if (PyErr_Occurred())
        return NULL;
    int status;
    Py_BEGIN_ALLOW_THREADS;
    status = linear(&job, threads);
    Py_END_ALLOW_THREADS;
    if (status)
        return PyErr_NoMemory();
    if (job.damaged)
        return damaged();
    Py_RETURN_NONE;
}

static PyObject *py_decode(PyObject *module, PyObject *const *a, Py_ssize_t count)
{
    struct job job;
    (void)module;
    if (count != WEIGHT_ARGUMENTS + 4)
        return PyErr_Format(PyExc_TypeError, "decode: %zd arguments", count);
    int64_t threads = weight_of(&job, a);
    a += WEIGHT_ARGUMENTS;
    job.out = address(a, 0), job.out_type = (int)number(a, 1), job.out_stride = number(a, 2);
    job.first_column = number(a, 3);
    if (PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    run(&job, decode_work, threads);
    Py_END_ALLOW_THREADS;
    if (job.damaged)
        return damaged();
    Py_RETURN_NONE;
}

/* Names of all paths in this build, best first, and whether this CPU has their instructions. */
static PyObject *py_paths(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    PyObject *paths = PyList_New(PATH_COUNT);
    for (int i = 0; paths && i < PATH_COUNT; i++) {
        PyObject *path = Py_BuildValue("(sO)", PATHS[i].name, PATHS[i].supported() ? Py_True : Py_False);
        if (!path)
            Py_CLEAR(paths);
        else
            PyList_SET_ITEM(paths, i, path);
    }
    return paths;
}

static PyObject *py_set_parallel(PyObject *module, PyObject *function)
{
    (void)module;
    void *found = PyLong_AsVoidPtr(function);
    if (PyErr_Occurred())
        return NULL;
    memcpy(&parallel, &found, sizeof found);
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"linear", (PyCFunction)(void (*)(void))py_linear, METH_FASTCALL, NULL},
    {"decode", (PyCFunction)(void (*)(void))py_decode, METH_FASTCALL, NULL},
    {"paths", py_paths, METH_NOARGS, NULL},
    {"set_parallel", py_set_parallel, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static int start(PyObject *module)
{
    (void)module;
#ifdef X86
    __builtin_cpu_init();
#endif
    for (int byte = 0; byte < 256; byte++) {
        E8M0[byte] = from_bits(byte == 255 ? 0x7fc00000 : byte ? (uint32_t)byte << 23 : 0x00400000);
        const int exponent = byte >> 3 & 15, mantissa = byte & 7;
        float value = exponent ? from_bits((uint32_t)(byte & 127) << 20) * 0x1p120f : mantissa * 0x1p-9f;
        value = (byte & 127) == 127 ? from_bits(0x7fc00000) : value;
        E4M3[byte] = byte & 128 ? -value : value;
    }
    return 0;
}

static PyModuleDef_Slot SLOTS[] = {
    {Py_mod_exec, start},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, .m_name = "_cpu", .m_methods = METHODS, .m_slots = SLOTS};

PyMODINIT_FUNC PyInit__cpu(void)
{
    return PyModuleDef_Init(&MODULE);
}
