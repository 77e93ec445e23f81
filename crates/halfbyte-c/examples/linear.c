/*
 * A layer of 4-bit weights: quantise, multiply, compare with the product of what the codes stand for.
 *
 *   cc linear.c $(pkg-config --cflags --libs halfbyte) -lm && ./a.out
 */
#include <halfbyte.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define N 96
#define K 256
#define M 3

/* Ends the program with the words of the call that failed. */
static void check(halfbyte_status status, const char *call) {
  if (status == HALFBYTE_STATUS_OK) return;
  fprintf(stderr, "%s: %s: %s\n", call, halfbyte_status_name((int32_t)status), halfbyte_last_error());
  exit(1);
}

/* A matrix of floats in memory of the host. */
static DLTensor matrix(float *data, int64_t *shape) {
  DLTensor tensor = {0};
  tensor.data = data;
  tensor.device.device_type = kDLCPU;
  tensor.ndim = 2;
  tensor.dtype.code = kDLFloat;
  tensor.dtype.bits = 32;
  tensor.dtype.lanes = 1;
  tensor.shape = shape;
  return tensor;
}

int main(void) {
  static float w[N * K], x[M * K], y[M * N], stands_for[N * K];
  int64_t w_shape[] = {N, K}, x_shape[] = {M, K}, y_shape[] = {M, N};
  DLTensor w_tensor = matrix(w, w_shape), x_tensor = matrix(x, x_shape), y_tensor = matrix(y, y_shape);
  DLTensor stands_for_tensor = matrix(stands_for, w_shape);
  halfbyte_device *device = NULL;
  halfbyte_weight *weight = NULL;
  halfbyte_linear *linear = NULL;
  double worst = 0;
  int i, j, r;

  if (halfbyte_abi_version() != HALFBYTE_ABI_VERSION) {
    fprintf(stderr, "the library is another one than the header\n");
    return 1;
  }
  for (i = 0; i < N * K; i++) w[i] = (float)sin(0.37 * i) * 0.1f;
  for (i = 0; i < M * K; i++) x[i] = (float)cos(0.11 * i);

  check(halfbyte_device_cpu(2, &device), "device");
  check(halfbyte_weight_rtn(&w_tensor, "w4a16-g128", HALFBYTE_RTN_DEFAULT, &weight), "quantise");
  check(halfbyte_linear_create(device, weight, NULL, HALFBYTE_ACTIVATION_NONE, &linear), "linear");
  check(halfbyte_linear_forward(linear, device, &x_tensor, &y_tensor), "forward");
  check(halfbyte_weight_dequantize(weight, &stands_for_tensor), "dequantise");

  for (r = 0; r < M; r++) {
    for (i = 0; i < N; i++) {
      double sum = 0, magnitude = 0;
      for (j = 0; j < K; j++) {
        double term = (double)x[r * K + j] * stands_for[i * K + j];
        sum += term;
        magnitude += fabs(term);
      }
      worst = fmax(worst, fabs(y[r * N + i] - sum) / magnitude);
    }
  }
  printf("halfbyte %s: %s, %d x %d in %zu bytes\n", halfbyte_version(), halfbyte_weight_format(weight), N, K,
         halfbyte_linear_bytes(linear));
  printf("off by at most %.1e of |x| |W|\n", worst);

  halfbyte_linear_free(linear);
  halfbyte_weight_free(weight);
  halfbyte_device_free(device);
  /* The bound of the library: one rounding of y, and 16 + sqrt(k) of sums in f32. */
  return worst <= (17 + sqrt(K)) * ldexp(1, -24) ? 0 : 1;
}
