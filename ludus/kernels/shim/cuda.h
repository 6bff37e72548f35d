// The subset of CUDA C++ that the shim runs; included before the source of a model. It declares
// nothing of libc, so that a source cannot reach it.
#pragma once

#define __global__
#define __device__
#define __host__
#define __constant__
#ifdef LUDUS_PLAIN_SHARED
#define __shared__ static
#else
#define __shared__ static __attribute__((section("ludus_shared")))
#endif
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define __CUDA_ARCH__ 900
#define __CUDACC__ 1
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define CUDART_INF_F __builtin_inff()
#define CUDART_NAN_F __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-7f
#define DBL_MAX 1.7976931348623158e+308
#define DBL_MIN 2.2250738585072014e-308
#define DBL_EPSILON 2.2204460492503131e-16
#define CHAR_BIT 8
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 4294967295u
#define LLONG_MAX 9223372036854775807ll
#define LLONG_MIN (-LLONG_MAX - 1)
#define ULLONG_MAX 18446744073709551615ull
#define M_PI 3.14159265358979323846
#define M_PI_F 3.14159265358979323846f
#define M_E 2.71828182845904523536
#define M_SQRT2 1.41421356237309504880
#define M_SQRT1_2 0.70710678118654752440
#define M_2_SQRTPI 1.12837916709551257390
#define M_LN2 0.69314718055994530942
#define M_LOG2E 1.44269504088896340736
#define NULL 0

typedef signed char int8_t; typedef unsigned char uint8_t;
typedef short int16_t; typedef unsigned short uint16_t;
typedef int int32_t; typedef unsigned int uint32_t;
typedef long int64_t; typedef unsigned long uint64_t;
typedef long intptr_t; typedef unsigned long uintptr_t; typedef long ptrdiff_t;
typedef unsigned long size_t;
typedef unsigned char uchar; typedef unsigned short ushort; typedef unsigned int uint;
typedef unsigned long ulong;

static const int warpSize = 32;

// Vectors

#define LUDUS_VECTOR(T, N, A2, A4) \
    struct N##1 { T x; }; \
    struct __attribute__((aligned(A2))) N##2 { T x, y; }; \
    struct N##3 { T x, y, z; }; \
    struct __attribute__((aligned(A4))) N##4 { T x, y, z, w; }; \
    static inline N##1 make_##N##1(T x) { return {x}; } \
    static inline N##2 make_##N##2(T x, T y) { return {x, y}; } \
    static inline N##3 make_##N##3(T x, T y, T z) { return {x, y, z}; } \
    static inline N##4 make_##N##4(T x, T y, T z, T w) { return {x, y, z, w}; }
LUDUS_VECTOR(signed char, char, 2, 4)
LUDUS_VECTOR(unsigned char, uchar, 2, 4)
LUDUS_VECTOR(short, short, 4, 8)
LUDUS_VECTOR(unsigned short, ushort, 4, 8)
LUDUS_VECTOR(int, int, 8, 16)
LUDUS_VECTOR(unsigned int, uint, 8, 16)
LUDUS_VECTOR(long long, longlong, 16, 16)
LUDUS_VECTOR(unsigned long long, ulonglong, 16, 16)
LUDUS_VECTOR(float, float, 8, 16)
LUDUS_VECTOR(double, double, 16, 16)
struct dim3 {
    unsigned int x, y, z;
    constexpr dim3(unsigned int a = 1, unsigned int b = 1, unsigned int c = 1) : x(a), y(b), z(c) {}
};

// The runtime's

extern "C" {
extern const uint3 threadIdx, blockIdx;
extern const uint3 blockDim, gridDim;
extern unsigned char ludus_dynamic[];
int ludus_barrier(int line, int predicate, int kind);
unsigned long long ludus_exchange(
    unsigned mask, unsigned long long value, int source, int line, unsigned long long *all,
    unsigned *present);
int ludus_lane(void);
void ludus_fail(const char *text, int line) __attribute__((noreturn));
}

// Arguments of a launch

struct ludus_value { int kind; void *pointer; long long integer; double real; };
template <class T> struct ludus_type { static const int kind = 3; };
template <class T> struct ludus_type<T *> { static const int kind = 0; };
template <class T> struct ludus_type<const T> : ludus_type<T> {};
#define LUDUS_INTEGER(T) template <> struct ludus_type<T> { static const int kind = 1; };
LUDUS_INTEGER(bool) LUDUS_INTEGER(char) LUDUS_INTEGER(signed char) LUDUS_INTEGER(unsigned char)
LUDUS_INTEGER(short) LUDUS_INTEGER(unsigned short) LUDUS_INTEGER(int) LUDUS_INTEGER(unsigned)
LUDUS_INTEGER(long) LUDUS_INTEGER(unsigned long) LUDUS_INTEGER(long long)
LUDUS_INTEGER(unsigned long long)
template <> struct ludus_type<float> { static const int kind = 2; };
template <> struct ludus_type<double> { static const int kind = 2; };
template <int KIND> struct ludus_take;
template <> struct ludus_take<0> {
    template <class P> static P get(const ludus_value &v) {
        if (v.kind != 0) ludus_fail("argument: a number is given for a pointer", 0);
        return (P)v.pointer;
    }
};
template <> struct ludus_take<1> {
    template <class P> static P get(const ludus_value &v) {
        if (v.kind == 0) ludus_fail("argument: a buffer is given for an integer", 0);
        if (v.kind == 2) ludus_fail("argument: a fraction is given for an integer", 0);
        return (P)v.integer;
    }
};
template <> struct ludus_take<2> {
    template <class P> static P get(const ludus_value &v) {
        if (v.kind == 0) ludus_fail("argument: a buffer is given for a number", 0);
        return v.kind == 1 ? (P)v.integer : (P)v.real;
    }
};
template <int... I> struct ludus_indices {};
template <int N, int... I> struct ludus_count : ludus_count<N - 1, N - 1, I...> {};
template <int... I> struct ludus_count<0, I...> { typedef ludus_indices<I...> type; };
template <class... P, int... I>
static inline void ludus_spread(void (*k)(P...), const ludus_value *v, ludus_indices<I...>) {
    k(ludus_take<ludus_type<P>::kind>::template get<P>(v[I])...);
}
template <class... P>
static inline void ludus_call(void (*k)(P...), const ludus_value *v, int given) {
    if (given != (int)sizeof...(P)) ludus_fail("arguments: their number is not the kernel's", 0);
    ludus_spread(k, v, typename ludus_count<sizeof...(P)>::type());
}

// Barriers and warps

#define LUDUS_LINE int ludus_line = __builtin_LINE()
static inline void __syncthreads(LUDUS_LINE) { ludus_barrier(ludus_line, 0, 0); }
static inline int __syncthreads_count(int p, LUDUS_LINE) { return ludus_barrier(ludus_line, !!p, 1); }
static inline int __syncthreads_and(int p, LUDUS_LINE) { return ludus_barrier(ludus_line, !!p, 2); }
static inline int __syncthreads_or(int p, LUDUS_LINE) { return ludus_barrier(ludus_line, !!p, 3); }
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}
static inline void __syncwarp(unsigned mask = 0xffffffffu, LUDUS_LINE) {
    ludus_exchange(mask, 0, -1, ludus_line, 0, 0);
}
template <class T> static inline T ludus_from(unsigned mask, T v, int source, int line) {
    static_assert(sizeof(T) <= 8, "a shuffle takes values of at most 8 bytes");
    unsigned long long bits = 0;
    __builtin_memcpy(&bits, &v, sizeof(T));
    bits = ludus_exchange(mask, bits, source, line, 0, 0);
    __builtin_memcpy(&v, &bits, sizeof(T));
    return v;
}
template <class T>
static inline T __shfl_sync(unsigned mask, T v, int lane, int width = 32, LUDUS_LINE) {
    int own = ludus_lane();
    return ludus_from(mask, v, (own & ~(width - 1)) | (lane & (width - 1)), ludus_line);
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T v, unsigned d, int width = 32, LUDUS_LINE) {
    int own = ludus_lane(), source = own + (int)d;
    return ludus_from(mask, v, (own & (width - 1)) + (int)d < width ? source : own, ludus_line);
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T v, unsigned d, int width = 32, LUDUS_LINE) {
    int own = ludus_lane(), source = own - (int)d;
    return ludus_from(mask, v, (own & (width - 1)) >= (int)d ? source : own, ludus_line);
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T v, int x, int width = 32, LUDUS_LINE) {
    int own = ludus_lane(), source = own ^ x;
    return ludus_from(mask, v, (source & ~(width - 1)) <= (own & ~(width - 1)) ? source : own,
                      ludus_line);
}
static inline unsigned __ballot_sync(unsigned mask, int p, LUDUS_LINE) {
    unsigned long long all[32];
    unsigned present, found = 0;
    ludus_exchange(mask, !!p, -1, ludus_line, all, &present);
    for (int i = 0; i < 32; i++) if (present >> i & 1 && all[i]) found |= 1u << i;
    return found;
}
static inline int __any_sync(unsigned mask, int p, LUDUS_LINE) {
    return __ballot_sync(mask, p, ludus_line) != 0;
}
static inline int __all_sync(unsigned mask, int p, LUDUS_LINE) {
    return __ballot_sync(mask, !p, ludus_line) == 0;
}
template <class T> static inline unsigned __match_any_sync(unsigned mask, T v, LUDUS_LINE) {
    unsigned long long all[32], bits = 0;
    unsigned present, found = 0;
    __builtin_memcpy(&bits, &v, sizeof(T));
    ludus_exchange(mask, bits, -1, ludus_line, all, &present);
    for (int i = 0; i < 32; i++) if (present >> i & 1 && all[i] == bits) found |= 1u << i;
    return found;
}
#define LUDUS_REDUCE(NAME, T, START, STEP) \
    static inline T NAME(unsigned mask, T v, LUDUS_LINE) { \
        unsigned long long all[32]; \
        unsigned present; \
        T r = START; \
        ludus_exchange(mask, (unsigned long long)v, -1, ludus_line, all, &present); \
        for (int i = 0; i < 32; i++) if (present >> i & 1) { T o = (T)all[i]; STEP; } \
        return r; \
    }
LUDUS_REDUCE(__reduce_add_sync, unsigned, 0, r += o)
LUDUS_REDUCE(__reduce_add_sync, int, 0, r += o)
LUDUS_REDUCE(__reduce_max_sync, unsigned, 0, r = o > r ? o : r)
LUDUS_REDUCE(__reduce_max_sync, int, INT_MIN, r = o > r ? o : r)
LUDUS_REDUCE(__reduce_min_sync, unsigned, UINT_MAX, r = o < r ? o : r)
LUDUS_REDUCE(__reduce_min_sync, int, INT_MAX, r = o < r ? o : r)
LUDUS_REDUCE(__reduce_and_sync, unsigned, UINT_MAX, r &= o)
LUDUS_REDUCE(__reduce_or_sync, unsigned, 0, r |= o)
LUDUS_REDUCE(__reduce_xor_sync, unsigned, 0, r ^= o)

// Atomics: one thread runs at a time

template <class T> struct ludus_same { typedef T type; };
#define LUDUS_ATOMIC(NAME, STEP) \
    template <class T> static inline T NAME(T *p, typename ludus_same<T>::type v) { \
        T old = *p; *p = STEP; return old; } \
    template <class T> static inline T NAME##_block(T *p, typename ludus_same<T>::type v) { \
        T old = *p; *p = STEP; return old; }
LUDUS_ATOMIC(atomicAdd, (T)(old + v))
LUDUS_ATOMIC(atomicSub, (T)(old - v))
LUDUS_ATOMIC(atomicExch, v)
LUDUS_ATOMIC(atomicMin, (v < old ? v : old))
LUDUS_ATOMIC(atomicMax, (v > old ? v : old))
LUDUS_ATOMIC(atomicAnd, (T)(old & v))
LUDUS_ATOMIC(atomicOr, (T)(old | v))
LUDUS_ATOMIC(atomicXor, (T)(old ^ v))
LUDUS_ATOMIC(atomicInc, (old >= v ? 0 : old + 1))
LUDUS_ATOMIC(atomicDec, (old == 0 || old > v ? v : old - 1))
template <class T>
static inline T atomicCAS(T *p, typename ludus_same<T>::type c, typename ludus_same<T>::type v) {
    T old = *p;
    if (old == c) *p = v;
    return old;
}

// Numbers

#define LUDUS_MATH1(NAME) \
    static inline float NAME##f(float x) { return __builtin_##NAME##f(x); } \
    static inline float NAME(float x) { return __builtin_##NAME##f(x); } \
    static inline double NAME(double x) { return __builtin_##NAME(x); } \
    static inline double NAME(int x) { return __builtin_##NAME((double)x); }
#define LUDUS_MATH2(NAME) \
    static inline float NAME##f(float x, float y) { return __builtin_##NAME##f(x, y); } \
    static inline float NAME(float x, float y) { return __builtin_##NAME##f(x, y); } \
    static inline double NAME(double x, double y) { return __builtin_##NAME(x, y); } \
    static inline double NAME(double x, int y) { return __builtin_##NAME(x, (double)y); } \
    static inline float NAME(float x, int y) { return __builtin_##NAME##f(x, (float)y); }
LUDUS_MATH1(sqrt) LUDUS_MATH1(cbrt) LUDUS_MATH1(exp) LUDUS_MATH1(exp2) LUDUS_MATH1(expm1)
LUDUS_MATH1(log) LUDUS_MATH1(log2) LUDUS_MATH1(log10) LUDUS_MATH1(log1p) LUDUS_MATH1(sin)
LUDUS_MATH1(cos) LUDUS_MATH1(tan) LUDUS_MATH1(asin) LUDUS_MATH1(acos) LUDUS_MATH1(atan)
LUDUS_MATH1(sinh) LUDUS_MATH1(cosh) LUDUS_MATH1(tanh) LUDUS_MATH1(asinh) LUDUS_MATH1(acosh)
LUDUS_MATH1(atanh) LUDUS_MATH1(erf) LUDUS_MATH1(erfc) LUDUS_MATH1(fabs) LUDUS_MATH1(floor)
LUDUS_MATH1(ceil) LUDUS_MATH1(trunc) LUDUS_MATH1(round) LUDUS_MATH1(rint) LUDUS_MATH1(nearbyint)
LUDUS_MATH1(lgamma) LUDUS_MATH1(tgamma)
LUDUS_MATH2(pow) LUDUS_MATH2(fmax) LUDUS_MATH2(fmin) LUDUS_MATH2(fmod) LUDUS_MATH2(atan2)
LUDUS_MATH2(hypot) LUDUS_MATH2(copysign) LUDUS_MATH2(fdim) LUDUS_MATH2(remainder)
static inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
static inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }
static inline float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
static inline float normcdff(float x) { return 0.5f * __builtin_erfcf(-x * 0.70710678118654752f); }
static inline float fdividef(float x, float y) { return x / y; }
static inline float ldexpf(float x, int e) { return __builtin_ldexpf(x, e); }
static inline int isnan(float x) { return x != x; }
static inline int isnan(double x) { return x != x; }
static inline int isinf(float x) { return __builtin_isinf(x) != 0; }
static inline int isinf(double x) { return __builtin_isinf(x) != 0; }
static inline int isfinite(float x) { return __builtin_isfinite(x); }
static inline int isfinite(double x) { return __builtin_isfinite(x); }
static inline int abs(int x) { return x < 0 ? -x : x; }
static inline long abs(long x) { return x < 0 ? -x : x; }
static inline long long abs(long long x) { return x < 0 ? -x : x; }
static inline float abs(float x) { return __builtin_fabsf(x); }
static inline double abs(double x) { return __builtin_fabs(x); }
static inline void sincosf(float x, float *s, float *c) { *s = sinf(x); *c = cosf(x); }
#define LUDUS_MINMAX(T) \
    static inline T min(T a, T b) { return b < a ? b : a; } \
    static inline T max(T a, T b) { return a < b ? b : a; }
LUDUS_MINMAX(int) LUDUS_MINMAX(unsigned) LUDUS_MINMAX(long) LUDUS_MINMAX(unsigned long)
LUDUS_MINMAX(long long) LUDUS_MINMAX(unsigned long long)
#define LUDUS_MIXED(A, B, R) \
    static inline R min(A a, B b) { return min((R)a, (R)b); } \
    static inline R max(A a, B b) { return max((R)a, (R)b); }
LUDUS_MIXED(int, unsigned, unsigned) LUDUS_MIXED(unsigned, int, unsigned)
LUDUS_MIXED(long, int, long) LUDUS_MIXED(int, long, long)
LUDUS_MIXED(unsigned long, int, unsigned long) LUDUS_MIXED(int, unsigned long, unsigned long)
LUDUS_MIXED(long long, int, long long) LUDUS_MIXED(int, long long, long long)
static inline float min(float a, float b) { return __builtin_fminf(a, b); }
static inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
static inline double min(double a, double b) { return __builtin_fmin(a, b); }
static inline double max(double a, double b) { return __builtin_fmax(a, b); }
static inline double min(float a, double b) { return __builtin_fmin(a, b); }
static inline double max(float a, double b) { return __builtin_fmax(a, b); }
static inline double min(double a, float b) { return __builtin_fmin(a, b); }
static inline double max(double a, float b) { return __builtin_fmax(a, b); }
static inline float __expf(float x) { return __builtin_expf(x); }
static inline float __exp10f(float x) { return __builtin_powf(10.0f, x); }
static inline float exp10f(float x) { return __builtin_powf(10.0f, x); }
static inline float __logf(float x) { return __builtin_logf(x); }
static inline float __log2f(float x) { return __builtin_log2f(x); }
static inline float __log10f(float x) { return __builtin_log10f(x); }
static inline float __sinf(float x) { return __builtin_sinf(x); }
static inline float __cosf(float x) { return __builtin_cosf(x); }
static inline float __tanf(float x) { return __builtin_tanf(x); }
static inline float __powf(float x, float y) { return __builtin_powf(x, y); }
static inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
static inline float __frsqrt_rn(float x) { return 1.0f / __builtin_sqrtf(x); }
static inline float __fdividef(float x, float y) { return x / y; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fsub_rn(float x, float y) { return x - y; }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
template <class A, class B> static inline A ludus_bits(B b) {
    static_assert(sizeof(A) == sizeof(B), "");
    A a;
    __builtin_memcpy(&a, &b, sizeof a);
    return a;
}
static inline int __float_as_int(float x) { return ludus_bits<int>(x); }
static inline unsigned __float_as_uint(float x) { return ludus_bits<unsigned>(x); }
static inline float __int_as_float(int x) { return ludus_bits<float>(x); }
static inline float __uint_as_float(unsigned x) { return ludus_bits<float>(x); }
static inline long long __double_as_longlong(double x) { return ludus_bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return ludus_bits<double>(x); }
static inline int __float2int_rn(float x) { return (int)__builtin_rintf(x); }
static inline int __float2int_rz(float x) { return (int)x; }
static inline int __float2int_rd(float x) { return (int)__builtin_floorf(x); }
static inline int __float2int_ru(float x) { return (int)__builtin_ceilf(x); }
static inline float __int2float_rn(int x) { return (float)x; }
static inline float __uint2float_rn(unsigned x) { return (float)x; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __mul24(int a, int b) { return a * b; }
static inline unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned)((unsigned long long)a * b >> 32);
}
static inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
static inline unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i);
    return r;
}
template <class T> static inline T __ldg(const T *p) { return *p; }
template <class T> static inline T __ldcg(const T *p) { return *p; }
template <class T> static inline T __ldcs(const T *p) { return *p; }
template <class T> static inline T __ldca(const T *p) { return *p; }
template <class T> static inline void __stcs(T *p, T v) { *p = v; }
template <class T> static inline void __stcg(T *p, T v) { *p = v; }
static inline void __trap(LUDUS_LINE) { ludus_fail("__trap() was called", ludus_line); }
#define assert(c) ((c) ? (void)0 : ludus_fail("an assertion failed", __LINE__))
static inline void *memcpy(void *a, const void *b, size_t n) { return __builtin_memcpy(a, b, n); }
static inline void *memset(void *a, int v, size_t n) { return __builtin_memset(a, v, n); }
static inline int printf(const char *, ...) { return 0; }

// Half precision

struct __half {
    unsigned short bits;
    __half() = default;
    __half(float x) : bits(ludus_bits<unsigned short>((_Float16)x)) {}
    __half(double x) : bits(ludus_bits<unsigned short>((_Float16)x)) {}
    __half(int x) : __half((float)x) {}
    operator float() const { return (float)ludus_bits<_Float16>(bits); }
};
struct __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float x) {
        unsigned u = ludus_bits<unsigned>(x);
        bits = x != x ? 0x7fff : (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16);
    }
    __nv_bfloat16(double x) : __nv_bfloat16((float)x) {}
    __nv_bfloat16(int x) : __nv_bfloat16((float)x) {}
    operator float() const { return ludus_bits<float>((unsigned)bits << 16); }
};
typedef __half half;
typedef __nv_bfloat16 nv_bfloat16;
#define LUDUS_HALF(T, NAME) \
    static inline T operator+(T a, T b) { return T((float)a + (float)b); } \
    static inline T operator-(T a, T b) { return T((float)a - (float)b); } \
    static inline T operator*(T a, T b) { return T((float)a * (float)b); } \
    static inline T operator/(T a, T b) { return T((float)a / (float)b); } \
    static inline T operator-(T a) { return T(-(float)a); } \
    static inline T &operator+=(T &a, T b) { return a = a + b; } \
    static inline T &operator-=(T &a, T b) { return a = a - b; } \
    static inline T &operator*=(T &a, T b) { return a = a * b; } \
    static inline T &operator/=(T &a, T b) { return a = a / b; } \
    static inline bool operator<(T a, T b) { return (float)a < (float)b; } \
    static inline bool operator>(T a, T b) { return (float)a > (float)b; } \
    static inline bool operator<=(T a, T b) { return (float)a <= (float)b; } \
    static inline bool operator>=(T a, T b) { return (float)a >= (float)b; } \
    static inline bool operator==(T a, T b) { return (float)a == (float)b; } \
    static inline bool operator!=(T a, T b) { return (float)a != (float)b; } \
    static inline float NAME##2float(T a) { return (float)a; } \
    static inline T __float2##NAME##_rn(float a) { return T(a); } \
    static inline T __hadd(T a, T b) { return a + b; } \
    static inline T __hsub(T a, T b) { return a - b; } \
    static inline T __hmul(T a, T b) { return a * b; } \
    static inline T __hdiv(T a, T b) { return a / b; } \
    static inline T __hneg(T a) { return -a; } \
    static inline T __hfma(T a, T b, T c) { return T((float)a * (float)b + (float)c); } \
    static inline T __hmax(T a, T b) { return T(__builtin_fmaxf(a, b)); } \
    static inline T __hmin(T a, T b) { return T(__builtin_fminf(a, b)); } \
    static inline T hexp(T a) { return T(__builtin_expf(a)); } \
    static inline T hsqrt(T a) { return T(__builtin_sqrtf(a)); } \
    static inline bool __hgt(T a, T b) { return a > b; } \
    static inline bool __hlt(T a, T b) { return a < b; }
LUDUS_HALF(__half, half)
LUDUS_HALF(__nv_bfloat16, bfloat16)
static inline float __half2float(__half a) { return (float)a; }
static inline __half __float2half(float a) { return __half(a); }
static inline float __bfloat162float(__nv_bfloat16 a) { return (float)a; }
static inline __nv_bfloat16 __float2bfloat16(float a) { return __nv_bfloat16(a); }
struct __attribute__((aligned(4))) __half2 { __half x, y; };
typedef __half2 half2;
static inline __half2 __halves2half2(__half a, __half b) { return {a, b}; }
static inline float2 __half22float2(__half2 a) { return {(float)a.x, (float)a.y}; }
static inline __half2 __float22half2_rn(float2 a) { return {__half(a.x), __half(a.y)}; }
static inline __half __low2half(__half2 a) { return a.x; }
static inline __half __high2half(__half2 a) { return a.y; }

#ifndef LUDUS_PLAIN_SHARED
extern "C" {
extern unsigned char __start_ludus_shared[] __attribute__((weak, visibility("hidden")));
extern unsigned char __stop_ludus_shared[] __attribute__((weak, visibility("hidden")));
__attribute__((visibility("default"))) void ludus_shared_area(unsigned char **at, size_t *bytes) {
    *at = __start_ludus_shared;
    *bytes = (size_t)(__stop_ludus_shared - __start_ludus_shared);
}
}
#endif
