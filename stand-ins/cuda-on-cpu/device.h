// What kernels are compiled against: as much of CUDA C++ as CubeCL's kernels use. What is not here does not compile.
#pragma once
#include "launch.h"
#include <math.h>
#include <string.h>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

static Place *place;
#define threadIdx (place->thread)
#define blockIdx (place->block)
#define blockDim (place->threads)
#define gridDim (place->blocks)

static inline void __syncthreads() { place->wait(Thread::WaitsForBlock); }
static inline void __syncwarp() { place->wait(Thread::WaitsForWarp); }

template <class A, class B> static inline std::common_type_t<A, B> min(A a, B b) { return a < b ? a : b; }
template <class A, class B> static inline std::common_type_t<A, B> max(A a, B b) { return a > b ? a : b; }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }

// PTX, one function an instruction: the compiler writes `asm("max.NaN.f32 %0, ..")` as a call of `ptx_max_NaN_f32`.
static inline void ptx_max_NaN_f32(float &to, float a, float b) { to = isnan(a) || isnan(b) ? NAN : fmaxf(a, b); }
static inline void ptx_min_NaN_f32(float &to, float a, float b) { to = isnan(a) || isnan(b) ? NAN : fminf(a, b); }
// One thread runs at a time, so that nothing comes between.
static inline void ptx_atom_relaxed_add_f32(float &before, const float *at, float value) {
    before = *at;
    *const_cast<float *>(at) = before + value;
}

// The upper half of a float. Every operation computes in float and rounds its result to nearest, ties to even.
struct __nv_bfloat16 {
    unsigned short bits;

    __nv_bfloat16() = default;
    template <class T, class = std::enable_if_t<std::is_arithmetic<T>::value>>
    __nv_bfloat16(T value) : bits(rounded((float)value)) {}
    operator float() const {
        unsigned wide = (unsigned)bits << 16;
        float value;
        memcpy(&value, &wide, 4);
        return value;
    }

private:
    static unsigned short rounded(float value) {
        unsigned wide;
        memcpy(&wide, &value, 4);
        if ((wide & 0x7fffffff) > 0x7f800000) return 0x7fff;
        return (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
    }
};
static inline __nv_bfloat16 operator+(__nv_bfloat16 a, __nv_bfloat16 b) { return (float)a + (float)b; }
static inline __nv_bfloat16 operator-(__nv_bfloat16 a, __nv_bfloat16 b) { return (float)a - (float)b; }
static inline __nv_bfloat16 operator*(__nv_bfloat16 a, __nv_bfloat16 b) { return (float)a * (float)b; }
static inline __nv_bfloat16 operator/(__nv_bfloat16 a, __nv_bfloat16 b) { return (float)a / (float)b; }

// Matrices of a warp. The first lane has all of each fragment and does the warp's work; the others wait for it.
namespace nvcuda {
namespace wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };
namespace precision {
struct tf32 {};
}

// Rounds to 10 bits of fraction, ties away from zero, as `cvt.rna.tf32.f32` does.
static inline float __float_to_tf32(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) < 0x7f800000) bits = (bits + 0x1000) & ~0x1fffu;
    memcpy(&value, &bits, 4);
    return value;
}

template <class T> struct Element {
    using Type = T;
};
template <> struct Element<precision::tf32> {
    using Type = float;
};

template <class Use, int m, int n, int k> struct Sides;
template <int m, int n, int k> struct Sides<matrix_a, m, n, k> {
    static const int rows = m, columns = k;
};
template <int m, int n, int k> struct Sides<matrix_b, m, n, k> {
    static const int rows = k, columns = n;
};
template <int m, int n, int k> struct Sides<accumulator, m, n, k> {
    static const int rows = m, columns = n;
};

// Row after row, whatever the layout in memory is.
template <class Use, int m, int n, int k, class T, class Layout = void> struct fragment : Sides<Use, m, n, k> {
    static const int num_elements = Sides<Use, m, n, k>::rows * Sides<Use, m, n, k>::columns;
    typename Element<T>::Type x[num_elements];
};

static inline bool first_lane() { return place->number % 32 == 0; }

template <class F, class P> static inline void load(F &to, const P *from, unsigned stride, layout_t layout) {
    __syncwarp();
    if (first_lane())
        for (int i = 0; i < F::rows; i++)
            for (int j = 0; j < F::columns; j++)
                to.x[i * F::columns + j] =
                    layout == mem_row_major ? from[(size_t)i * stride + j] : from[(size_t)j * stride + i];
    // The first lane runs first after a barrier, and has read before another one can write.
    if (place->backwards) __syncwarp();
}

template <class Use, int m, int n, int k, class T, class Layout, class P>
static inline void load_matrix_sync(fragment<Use, m, n, k, T, Layout> &to, const P *from, unsigned stride) {
    load(to, from, stride, std::is_same<Layout, row_major>::value ? mem_row_major : mem_col_major);
}

template <int m, int n, int k, class T, class P>
static inline void load_matrix_sync(fragment<accumulator, m, n, k, T> &to, const P *from, unsigned stride,
                                    layout_t layout) {
    load(to, from, stride, layout);
}

template <int m, int n, int k, class T, class P>
static inline void store_matrix_sync(P *to, const fragment<accumulator, m, n, k, T> &from, unsigned stride,
                                     layout_t layout) {
    __syncwarp();
    if (first_lane())
        for (int i = 0; i < m; i++)
            for (int j = 0; j < n; j++)
                to[layout == mem_row_major ? (size_t)i * stride + j : (size_t)j * stride + i] = from.x[i * n + j];
    __syncwarp();
}

template <class F, class V> static inline void fill_fragment(F &to, V value) {
    if (!first_lane()) return;
    for (auto &x : to.x) x = value;
}

// Products are added in float, in the order of k.
template <int m, int n, int k, class TD, class TA, class LA, class TB, class LB, class TC>
static inline void mma_sync(fragment<accumulator, m, n, k, TD> &d, const fragment<matrix_a, m, n, k, TA, LA> &a,
                            const fragment<matrix_b, m, n, k, TB, LB> &b,
                            const fragment<accumulator, m, n, k, TC> &c) {
    if (!first_lane()) return;
    static float left[m * k], right[k * n];
    for (int i = 0; i < m * k; i++) left[i] = a.x[i];
    for (int i = 0; i < k * n; i++) right[i] = b.x[i];
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            float sum = c.x[i * n + j];
            for (int q = 0; q < k; q++) sum += left[i * k + q] * right[q * n + j];
            d.x[i * n + j] = sum;
        }
}

} // namespace wmma
} // namespace nvcuda

template <class... A, size_t... I>
static inline void call(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*static_cast<A *>(arguments[I])...);
}
template <class... A> static inline void call(void (*kernel)(A...), void **arguments) {
    call(kernel, arguments, std::index_sequence_for<A...>());
}

// Its own in each kernel, where types of one name differ. No argument has no bytes, so that a zero is the end.
namespace {
template <class... A> struct Sizes {
    static constexpr size_t of[] = {sizeof(A)..., 0};
};
template <class... A> Sizes<A...> arguments_of(void (*)(A...));
} // namespace

// What the compiler writes after each kernel's source.
#define EXPORT_KERNEL(name, bound, waits)                                                                           \
    static void run_##name(void **arguments) { call(name, arguments); }                                             \
    extern "C" Kernel kernel_of_##name;                                                                             \
    Kernel kernel_of_##name = {bound, waits, run_##name, decltype(arguments_of(name))::of, &place};

// CubeCL's kernels declare these types themselves, where the host has them as `long`.
#define int64_t device_int64_t
#define uint64_t device_uint64_t

// What is left of these in a kernel is PTX that the compiler could not read, or memory that nobody would give it.
#define asm unknown_assembly
#define __shared__ unknown_shared_memory
