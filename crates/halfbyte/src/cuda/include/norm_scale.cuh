// The power of two by which vectors are scaled before products whose sums a norm's factor divides (folded_norm.cuh).
#pragma once

// That of the factor of the norm before, so that numbers are near 1, times 2^-6: half floats then have 2^22 left above,
// and 2^8 until they lose bits.
DEV float scale_of_norm(float factor) { return __uint_as_float(__float_as_uint(factor) & 0x7f800000u) * 0.015625f; }
