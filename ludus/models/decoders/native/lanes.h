/* Shared by all kernels: vector width, register tile size, and `num`, the type of factors (float32,
   or bfloat16 with HALF). ROW_CASES: CASE for each number of rows up to ROWS. */

#include <stdint.h>

#if defined(__AVX512F__)
#define LANES 16
#define ROWS 12 /* rows of the register tile: 12 x 2 sums, 2 weights, 1 input of 32 registers */
#elif defined(__AVX__)
#define LANES 8
#define ROWS 6
#else
#define LANES 4
#define ROWS 8
#endif
#define UP_TO_6 CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if ROWS == 12
#define ROW_CASES UP_TO_6 CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#elif ROWS == 8
#define ROW_CASES UP_TO_6 CASE(7) CASE(8)
#else
#define ROW_CASES UP_TO_6
#endif
#define PANEL (2 * LANES)
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#ifdef HALF
typedef uint16_t num;

INLINE float widen(num x) {
    union { uint32_t i; float f; } u = {(uint32_t)x << 16};
    return u.f;
}

/* Round to the nearest bfloat16, ties to even; keeps NaN. */
INLINE num narrow(float x) {
    union { float f; uint32_t i; } u = {x};
    uint32_t up = u.i + 0x7fff + (u.i >> 16 & 1);
    return (x == x ? up : 0x7fc00000u) >> 16;
}
#else
typedef float num;
INLINE float widen(num x) { return x; }
INLINE num narrow(float x) { return x; }
#endif
