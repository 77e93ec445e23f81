/*
 * A layer on a GPU, on memory and in a stream of the CUDA runtime, against the same layer on a CPU. Needs a CUDA toolkit and a GPU:
 *
 *   gcc -std=c99 cuda.c $(pkg-config --cflags --libs halfbyte) -I /usr/local/cuda/include -L /usr/local/cuda/lib64 -lcudart -lm
 */
#include <cuda_runtime_api.h>
#include <halfbyte.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N 192
#define K 512
#define M 5

/* Ends the program with the words of the call that failed. */
static void check(halfbyte_status status, const char *call) {
  if (status == HALFBYTE_STATUS_OK) return;
  fprintf(stderr, "%s: %s: %s\n", call, halfbyte_status_name((int32_t)status), halfbyte_last_error());
  exit(1);
}
static void cuda(cudaError_t status, const char *call) {
  if (status == cudaSuccess) return;
  fprintf(stderr, "%s: %s\n", call, cudaGetErrorString(status));
  exit(1);
}

static DLTensor matrix(void *data, int64_t *shape, int32_t where) {
  DLTensor tensor = {0};
  tensor.data = data;
  tensor.device.device_type = where;
  tensor.ndim = 2;
  tensor.dtype.code = kDLFloat;
  tensor.dtype.bits = 32;
  tensor.dtype.lanes = 1;
  tensor.shape = shape;
  return tensor;
}

int main(void) {
  static float w[N * K], x[M * K], y[M * N], want[M * N];
  int64_t w_shape[] = {N, K}, x_shape[] = {M, K}, y_shape[] = {M, N};
  DLTensor w_tensor = matrix(w, w_shape, kDLCPU), x_tensor = matrix(x, x_shape, kDLCPU);
  DLTensor y_tensor = matrix(y, y_shape, kDLCPU), want_tensor = matrix(want, y_shape, kDLCPU), x_there, y_there;
  halfbyte_device *cpu = NULL, *gpu = NULL, *in_stream = NULL;
  halfbyte_weight *weight = NULL;
  halfbyte_linear *on_cpu = NULL, *on_gpu = NULL;
  cudaStream_t stream;
  void *x_device, *y_device;
  double worst = 0, scale = 0;
  int i;

  for (i = 0; i < N * K; i++) w[i] = (float)sin(0.37 * i) * 0.1f;
  for (i = 0; i < M * K; i++) x[i] = (float)cos(0.11 * i);
  cuda(cudaSetDevice(0), "cudaSetDevice");
  cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  cuda(cudaMalloc(&x_device, sizeof x), "cudaMalloc");
  cuda(cudaMalloc(&y_device, sizeof y), "cudaMalloc");
  x_there = matrix(x_device, x_shape, kDLCUDA), y_there = matrix(y_device, y_shape, kDLCUDA);

  check(halfbyte_device_cpu(2, &cpu), "CPU");
  check(halfbyte_device_cuda(0, &gpu), "GPU");
  check(halfbyte_device_with_stream(gpu, stream, &in_stream), "stream");
  check(halfbyte_weight_rtn(&w_tensor, "w4a16-g128", HALFBYTE_RTN_DEFAULT, &weight), "quantise");
  check(halfbyte_linear_create(cpu, weight, NULL, HALFBYTE_ACTIVATION_NONE, &on_cpu), "linear");
  check(halfbyte_linear_create(gpu, weight, NULL, HALFBYTE_ACTIVATION_NONE, &on_gpu), "linear on the GPU");
  check(halfbyte_linear_forward(on_cpu, cpu, &x_tensor, &want_tensor), "forward");

  /* All in one stream, which nothing but the last call waits for. */
  cuda(cudaMemcpyAsync(x_device, x, sizeof x, cudaMemcpyHostToDevice, stream), "copy x");
  check(halfbyte_linear_forward(on_gpu, in_stream, &x_there, &y_there), "forward on the GPU");
  cuda(cudaMemcpyAsync(y, y_device, sizeof y, cudaMemcpyDeviceToHost, stream), "copy y");
  cuda(cudaStreamSynchronize(stream), "wait");
  for (i = 0; i < M * N; i++) worst = fmax(worst, fabs(y[i] - want[i])), scale = fmax(scale, fabs(want[i]));

  /* The host's memory is taken as well. */
  memset(y, 0, sizeof y);
  check(halfbyte_linear_forward(on_gpu, in_stream, &x_tensor, &y_tensor), "forward on memory of the host");
  for (i = 0; i < M * N; i++) worst = fmax(worst, fabs(y[i] - want[i]));
  printf("off by at most %.1e, of outputs up to %.1f\n", worst, scale);

  /* A tensor on another device than the layer. */
  if (halfbyte_linear_forward(on_cpu, cpu, &x_there, &want_tensor) == HALFBYTE_STATUS_OK) return 1;
  printf("refused: %s\n", halfbyte_last_error());

  halfbyte_linear_free(on_gpu);
  halfbyte_linear_free(on_cpu);
  halfbyte_weight_free(weight);
  halfbyte_device_free(in_stream);
  halfbyte_device_free(gpu);
  halfbyte_device_free(cpu);
  cuda(cudaFree(x_device), "cudaFree");
  cuda(cudaFree(y_device), "cudaFree");
  cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
  /* Two sums in f32 in other orders, of 512 terms each. */
  return worst <= 1e-4 * scale ? 0 : 1;
}
