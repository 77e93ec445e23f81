/*
 * Every way in which a call can be refused, from C: the status, the words, and that nothing was made. Usage: errors MODEL QUANTISED,
 * a dense model and a file of one that is quantised.
 * What it is linked with runs under valgrind, too.
 */
#include <halfbyte.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures = 0;

/* The call answered `status`, and the words hold `words`. */
static void expect(int line, halfbyte_status got, halfbyte_status status, const char *words) {
  const char *said = halfbyte_last_error();
  if (got != status || (status != HALFBYTE_STATUS_OK && strstr(said, words) == NULL)) {
    fprintf(stderr, "line %d: expected %s with \"%s\", got %s: %s\n", line, halfbyte_status_name((int32_t)status), words,
            halfbyte_status_name((int32_t)got), said);
    failures++;
  }
}
#define OK(call) expect(__LINE__, call, HALFBYTE_STATUS_OK, "")
#define INVALID(call, words) expect(__LINE__, call, HALFBYTE_STATUS_INVALID_ARGUMENT, words)
#define FAILS(call, status, words) expect(__LINE__, call, HALFBYTE_STATUS_##status, words)
#define HOLDS(condition)                                            \
  do {                                                              \
    if (!(condition)) {                                             \
      fprintf(stderr, "line %d: %s is not so\n", __LINE__, #condition); \
      failures++;                                                   \
    }                                                               \
  } while (0)

static DLTensor tensor(void *data, int code, int bits, int ndim, int64_t *shape) {
  DLTensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device.device_type = kDLCPU;
  t.ndim = ndim;
  t.dtype.code = (uint8_t)code;
  t.dtype.bits = (uint8_t)bits;
  t.dtype.lanes = 1;
  t.shape = shape;
  return t;
}

static float w[8 * 32], x[4 * 32], y[4 * 8], bias[8];
static int64_t w_shape[] = {8, 32}, x_shape[] = {4, 32}, y_shape[] = {4, 8}, bias_shape[] = {8};

/* Tensors of every bad kind, as x of a product. */
static void tensors(halfbyte_linear *linear, halfbyte_device *device) {
  const DLTensor good_x = tensor(x, kDLFloat, 32, 2, x_shape), good_y = tensor(y, kDLFloat, 32, 2, y_shape);
  int64_t negative[] = {-1, 32}, huge[] = {INT64_MAX, 32}, huge_bytes[] = {INT64_MAX / 32, 32}, other[] = {4, 31};
  int64_t deep[33], column_major[] = {1, 4}, gaps[] = {33, 1}, plain[] = {32, 1}, any_first[] = {7, 1};
  int64_t none[] = {0, 32}, none_out[] = {0, 8}, one_row[] = {1, 32}, one_out[] = {1, 8}, three[] = {2, 2, 32};
  int64_t three_out[] = {2, 2, 8}, vector[] = {32}, vector_out[] = {8};
  DLTensor t, out;
  int i;
#define X(change, words)                                          \
  do {                                                            \
    t = good_x;                                                   \
    change;                                                       \
    INVALID(halfbyte_linear_forward(linear, device, &t, &good_y), words); \
  } while (0)
  for (i = 0; i < 33; i++) deep[i] = 1;
  INVALID(halfbyte_linear_forward(linear, device, NULL, &good_y), "x: expected a pointer, got null");
  INVALID(halfbyte_linear_forward(linear, device, &good_x, NULL), "y: expected a pointer, got null");
  INVALID(halfbyte_linear_forward(NULL, device, &good_x, &good_y), "linear: expected a pointer");
  INVALID(halfbyte_linear_forward(linear, NULL, &good_x, &good_y), "device: expected a pointer");
  X(t.data = NULL, "x: expected data of 128 elements, got null");
  X(t.shape = NULL, "x: expected a shape of 2 dimensions, got null");
  X(t.shape = negative, "dimensions of at least 0");
  X(t.shape = huge, "fits memory");
  X(t.shape = huge_bytes, "fits memory");
  X(t.shape = other, "x: expected shape [.., 32], got [4, 31]");
  X(t.ndim = -1, "dimensions, got -1");
  X((t.ndim = 33, t.shape = deep), "dimensions, got 33");
  X(t.ndim = 0, "x: expected shape [.., 32], got []");
  X(t.strides = column_major, "strides [32, 1], row-major without gaps, got [1, 4]");
  X(t.strides = gaps, "row-major without gaps");
  X(t.dtype.lanes = 4, "4 lanes");
  X(t.dtype.bits = 64, "64 bits");
  X(t.dtype.code = 77, "type code 77");
  X((t.dtype.code = kDLInt, t.dtype.bits = 8), "x: expected floats: f16, bf16 or f32, got i8");
  X((t.dtype.code = kDLInt, t.dtype.bits = 32), "x: expected floats");
  X(t.byte_offset = 2, "at a multiple of 4 bytes");
  X(t.byte_offset = UINT64_MAX, "within memory");
  X(t.device.device_type = 99, "device type 99");
  X((t.device.device_type = kDLCUDA, t.device.device_id = -1), "a GPU's number");
  X((t.device.device_type = kDLCUDA, t.device.device_id = 0), "expected memory of the host, got memory of GPU 0");
  X(t.data = y, "memory of its own");
#undef X
  t = good_y;
  t.shape = x_shape;
  INVALID(halfbyte_linear_forward(linear, device, &good_x, &t), "y: expected shape [4, 8], got [4, 32]");
  t = good_y;
  t.dtype.code = kDLUInt;
  t.dtype.bits = 8;
  INVALID(halfbyte_linear_forward(linear, device, &good_x, &t), "y: expected floats");

  /* What is right though it looks odd: strides that say nothing new, pinned memory, offsets, other ranks, no rows. */
  t = good_x;
  t.strides = plain;
  OK(halfbyte_linear_forward(linear, device, &t, &good_y));
  t.strides = NULL;
  t.device.device_type = kDLCUDAHost;
  OK(halfbyte_linear_forward(linear, device, &t, &good_y));
  t = good_x;
  t.shape = one_row;
  t.strides = any_first;
  t.byte_offset = 3 * 32 * sizeof(float);
  out = good_y;
  out.shape = one_out;
  {
    /* The same row by its address; beside others it may be summed in another order. */
    float last[8];
    DLTensor row = tensor(x + 3 * 32, kDLFloat, 32, 2, one_row);
    OK(halfbyte_linear_forward(linear, device, &row, &out));
    memcpy(last, y, sizeof last);
    memset(y, 0xff, sizeof y);
    OK(halfbyte_linear_forward(linear, device, &t, &out));
    HOLDS(memcmp(last, y, sizeof last) == 0);
  }
  t = tensor(x, kDLFloat, 32, 3, three);
  out = tensor(y, kDLFloat, 32, 3, three_out);
  OK(halfbyte_linear_forward(linear, device, &t, &out));
  t = tensor(x, kDLFloat, 32, 1, vector);
  out = tensor(y, kDLFloat, 32, 1, vector_out);
  OK(halfbyte_linear_forward(linear, device, &t, &out));
  t = tensor(NULL, kDLFloat, 32, 2, none);
  out = tensor(NULL, kDLFloat, 32, 2, none_out);
  OK(halfbyte_linear_forward(linear, device, &t, &out));
}

static void *other_thread(void *unused) {
  (void)unused;
  /* No call of this thread has failed. */
  return strcmp(halfbyte_last_error(), "") == 0 ? NULL : (void *)w;
}

static void weights_and_layers(halfbyte_device *device) {
  DLTensor wt = tensor(w, kDLFloat, 32, 2, w_shape), bt = tensor(bias, kDLFloat, 32, 1, bias_shape), t;
  halfbyte_weight *weight = NULL, *none = (halfbyte_weight *)w;
  halfbyte_linear *linear = NULL, *no_linear = (halfbyte_linear *)w;
  int64_t high[] = {INT64_C(1) << 40, 0}, wide[] = {0, INT64_C(1) << 40};
  void *told = NULL;
  pthread_t thread;

  INVALID(halfbyte_weight_rtn(&wt, "w4a16-g32", 0, NULL), "out: expected a pointer, got null");
  INVALID(halfbyte_weight_rtn(NULL, "w4a16-g32", 0, &none), "w: expected a pointer");
  HOLDS(none == NULL);
  INVALID(halfbyte_weight_rtn(&wt, NULL, 0, &none), "format: expected a pointer");
  INVALID(halfbyte_weight_rtn(&wt, "w5a16", 0, &none), "weights of 2, 3, 4 or 8 bits");
  INVALID(halfbyte_weight_rtn(&wt, "w4a16-g32-g64", 0, &none), "each property once");
  INVALID(halfbyte_weight_rtn(&wt, "\xff", 0, &none), "text in UTF-8");
  INVALID(halfbyte_weight_rtn(&wt, "w4a16", 4, &none), "a sum of HALFBYTE_RTN_*");
  INVALID(halfbyte_weight_rtn(&wt, "w4a16-g16-asym", HALFBYTE_RTN_FULL_RANGE, &none), "flags: expected HALFBYTE_RTN_FULL_RANGE with");
  INVALID(halfbyte_weight_rtn(&wt, "w4a16-g16-float", HALFBYTE_RTN_FULL_RANGE | HALFBYTE_RTN_SEARCH, &none), "no offsets, got it with");
  HOLDS(none == NULL);
  OK(halfbyte_weight_rtn(&wt, "w4a16-g16", HALFBYTE_RTN_FULL_RANGE, &none));
  halfbyte_weight_free(none);
  none = NULL;
  INVALID(halfbyte_weight_rtn(&bt, "w4a16", 0, &none), "w: expected 2 dimensions, got shape [8]");
  w[37] = NAN;
  FAILS(halfbyte_weight_rtn(&wt, "w4a16", 0, &none), BAD_INPUT, "row 1, column 5");
  w[37] = 0.5f;
  INVALID(halfbyte_weight_dense(NULL, &none), "w: expected a pointer");
  t = wt;
  t.shape = high;
  INVALID(halfbyte_weight_rtn(&t, "w4a16", 0, &none), "rows or columns of a weight without elements");
  t.shape = wide;
  INVALID(halfbyte_weight_rtn(&t, "w8a8-g2", 0, &none), "rows or columns of a weight without elements");
  OK(halfbyte_weight_dense(&t, &none));
  INVALID(halfbyte_linear_create(device, none, NULL, 0, &no_linear), "rows or columns of a weight without elements");
  halfbyte_weight_free(none);
  none = NULL;
  INVALID(halfbyte_weight_load(NULL, "a", HALFBYTE_ACT_A16, &none), "checkpoint: expected a pointer");
  HOLDS(none == NULL && halfbyte_weight_n(NULL) == 0 && halfbyte_weight_k(NULL) == 0 && halfbyte_weight_format(NULL) == NULL);

  OK(halfbyte_weight_rtn(&wt, "w4a16-g32-asym", HALFBYTE_RTN_SEARCH, &weight));
  HOLDS(halfbyte_weight_n(weight) == 8 && halfbyte_weight_k(weight) == 32);
  HOLDS(strcmp(halfbyte_weight_format(weight), "w4a16-g32-asym") == 0);
  INVALID(halfbyte_weight_dequantize(NULL, &wt), "weight: expected a pointer");
  INVALID(halfbyte_weight_dequantize(weight, &bt), "out: expected shape [8, 32]");
  t = wt;
  t.dtype.bits = 16;
  INVALID(halfbyte_weight_dequantize(weight, &t), "elements of f32");

  INVALID(halfbyte_linear_create(NULL, weight, NULL, 0, &no_linear), "device: expected a pointer");
  HOLDS(no_linear == NULL);
  INVALID(halfbyte_linear_create(device, NULL, NULL, 0, &no_linear), "weight: expected a pointer");
  INVALID(halfbyte_linear_create(device, weight, NULL, 99, &no_linear), "one of HALFBYTE_ACTIVATION_*, got 99");
  INVALID(halfbyte_linear_create(device, weight, &wt, 0, &no_linear), "bias: expected shape [8]");
  INVALID(halfbyte_linear_create(device, weight, NULL, 0, NULL), "out: expected a pointer");
  HOLDS(halfbyte_linear_n(NULL) == 0 && halfbyte_linear_k(NULL) == 0 && halfbyte_linear_bytes(NULL) == 0);
  OK(halfbyte_linear_create(device, weight, &bt, HALFBYTE_ACTIVATION_RELU, &linear));
  HOLDS(halfbyte_linear_n(linear) == 8 && halfbyte_linear_k(linear) == 32 && halfbyte_linear_bytes(linear) > 0);
  halfbyte_weight_free(weight);
  tensors(linear, device);
  halfbyte_linear_free(linear);

  HOLDS(strlen(halfbyte_last_error()) > 0);
  HOLDS(pthread_create(&thread, NULL, other_thread, NULL) == 0 && pthread_join(thread, &told) == 0 && told == NULL);
  HOLDS(strcmp(halfbyte_status_name(99), "unknown status") == 0 && strcmp(halfbyte_status_name(-1), "unknown status") == 0);
  HOLDS(strcmp(halfbyte_status_name(HALFBYTE_STATUS_INTERNAL), "internal error") == 0);
}

static void devices(void) {
  halfbyte_device *device = (halfbyte_device *)w, *cpu = NULL;
  size_t gpus = 77;
  INVALID(halfbyte_device_cpu(1, NULL), "out: expected a pointer");
  OK(halfbyte_cuda_count(&gpus));
  INVALID(halfbyte_cuda_count(NULL), "out: expected a pointer");
  /* A number that no machine has. */
  FAILS(halfbyte_device_cuda(4000000000u, &device), DEVICE, "");
  HOLDS(device == NULL && gpus < 77);
  INVALID(halfbyte_device_with_stream(NULL, NULL, &device), "device: expected a pointer");
  OK(halfbyte_device_cpu(1, &cpu));
  INVALID(halfbyte_device_with_stream(cpu, NULL, &device), "expected a GPU, which has streams, got a CPU");
  INVALID(halfbyte_device_synchronize(NULL), "device: expected a pointer");
  OK(halfbyte_device_synchronize(cpu));
  halfbyte_device_free(cpu);
}

/* 2 input channels, 3 outputs, 3 x 3, padding 1. */
static void convolutions(halfbyte_device *device) {
  static float weights[3 * 2 * 9], image[2 * 5 * 5], planes[3 * 5 * 5], pixels[3 * 5 * 5];
  int64_t shape[] = {3, 2, 3, 3}, in[] = {1, 2, 5, 5}, out[] = {1, 3, 5, 5}, last[] = {1, 5, 5, 3}, wrong[] = {1, 3, 4, 5};
  halfbyte_conv2d_geometry geometry = {2, 3, {3, 3}, {1, 1}, {1, 1, 1, 1}, {1, 1}, 1}, bad = geometry;
  halfbyte_weight *weight = NULL;
  halfbyte_conv2d *conv = NULL, *nhwc = NULL, *none = (halfbyte_conv2d *)w;
  DLTensor wt = tensor(weights, kDLFloat, 32, 4, shape), it = tensor(image, kDLFloat, 32, 4, in);
  DLTensor ot = tensor(planes, kDLFloat, 32, 4, out), lt = tensor(pixels, kDLFloat, 32, 4, last), t;
  int i, c;
  for (i = 0; i < 54; i++) weights[i] = (float)((i * 7) % 11 - 5) * 0.1f;
  for (i = 0; i < 50; i++) image[i] = (float)(i % 9) - 4.0f;
  bad.groups = 2;
  INVALID(halfbyte_weight_rtn_conv2d(&wt, NULL, "w8a16", 0, &weight), "geometry: expected a pointer");
  INVALID(halfbyte_weight_rtn_conv2d(&wt, &bad, "w8a16", 0, &weight), "groups");
  INVALID(halfbyte_weight_rtn_conv2d(&it, &geometry, "w8a16", 0, &weight), "w: expected shape [3, 2, 3, 3]");
  INVALID(halfbyte_weight_rtn_conv2d(&wt, &geometry, "w8a16-g4", 0, &weight), "");
  INVALID(halfbyte_weight_rtn_conv2d(&wt, &geometry, "w8a16-asym", HALFBYTE_RTN_FULL_RANGE, &weight), "no zero points");
  OK(halfbyte_weight_rtn_conv2d(&wt, &geometry, "w8a16", 0, &weight));
  INVALID(halfbyte_conv2d_create(device, weight, &geometry, NULL, 0, 2, 0, &none), "x_layout: expected one of HALFBYTE_LAYOUT_*");
  HOLDS(none == NULL);
  INVALID(halfbyte_conv2d_create(device, weight, &geometry, NULL, 0, 0, 9, &none), "y_layout: expected one of");
  INVALID(halfbyte_conv2d_create(device, weight, &bad, NULL, 0, 0, 0, &none), "groups");
  bad = geometry;
  bad.ci = 4;
  INVALID(halfbyte_conv2d_create(device, weight, &bad, NULL, 0, 0, 0, &none), "a weight of 3");
  OK(halfbyte_conv2d_create(device, weight, &geometry, NULL, 0, HALFBYTE_LAYOUT_NCHW, HALFBYTE_LAYOUT_NCHW, &conv));
  OK(halfbyte_conv2d_create(device, weight, &geometry, NULL, 0, HALFBYTE_LAYOUT_NCHW, HALFBYTE_LAYOUT_NHWC, &nhwc));
  OK(halfbyte_conv2d_forward(conv, device, &it, &ot));
  OK(halfbyte_conv2d_forward(nhwc, device, &it, &lt));
  for (c = 0; c < 3; c++)
    for (i = 0; i < 25; i++) HOLDS(planes[c * 25 + i] == pixels[i * 3 + c]);
  /* The pixel in the middle, against its definition: 8 bits are off by half a step of 0.5 / 127 for each of 18 terms. */
  for (c = 0; c < 3; c++) {
    double sum = 0, magnitude = 0;
    int channel, ky, kx;
    for (channel = 0; channel < 2; channel++)
      for (ky = 0; ky < 3; ky++)
        for (kx = 0; kx < 3; kx++) {
          double v = image[channel * 25 + (ky + 1) * 5 + kx + 1];
          sum += v * weights[((c * 2 + channel) * 3 + ky) * 3 + kx];
          magnitude += fabs(v);
        }
    HOLDS(fabs(planes[c * 25 + 12] - sum) <= 0.51 * 0.5 / 127 * magnitude);
  }
  INVALID(halfbyte_conv2d_forward(conv, device, &ot, &ot), "2 channels, in the order nchw");
  INVALID(halfbyte_conv2d_forward(conv, device, &it, &lt), "y: expected shape [1, 3, 5, 5]");
  t = ot;
  t.shape = wrong;
  INVALID(halfbyte_conv2d_forward(conv, device, &it, &t), "y: expected shape [1, 3, 5, 5]");
  t = it;
  t.ndim = 3;
  INVALID(halfbyte_conv2d_forward(conv, device, &t, &ot), "x: expected 4 dimensions");
  t = ot;
  t.data = image;
  INVALID(halfbyte_conv2d_forward(conv, device, &it, &t), "memory of its own");
  INVALID(halfbyte_conv2d_forward(NULL, device, &it, &ot), "conv2d: expected a pointer");
  halfbyte_conv2d_free(conv);
  halfbyte_conv2d_free(nhwc);
  halfbyte_weight_free(weight);
}

static void bytes(halfbyte_device *device) {
  static int8_t codes[4] = {1, -2, 3, 100}, kernel[2] = {5, -6};
  static uint8_t in[2] = {10, 20}, out[2];
  static float scale[1] = {0.5f}, floats[2], float_bias[2] = {1, 2};
  static int32_t zeros[1] = {0}, int_bias[2] = {7, -7};
  int64_t square[] = {2, 2}, one[] = {1}, two[] = {2}, row[] = {1, 2}, k_shape[] = {1, 2, 1, 1}, image[] = {1, 2, 1, 1}, pixel[] = {1, 1, 1, 1};
  halfbyte_conv2d_geometry geometry = {2, 1, {1, 1}, {1, 1}, {0, 0, 0, 0}, {1, 1}, 1};
  DLTensor ct = tensor(codes, kDLInt, 8, 2, square), st = tensor(scale, kDLFloat, 32, 1, one), zt = tensor(zeros, kDLInt, 32, 1, one);
  DLTensor bt = tensor(int_bias, kDLInt, 32, 1, two), fbt = tensor(float_bias, kDLFloat, 32, 1, two);
  DLTensor it = tensor(in, kDLUInt, 8, 2, row), ot = tensor(out, kDLUInt, 8, 2, row), ft = tensor(floats, kDLFloat, 32, 2, row);
  DLTensor kt = tensor(kernel, kDLInt, 8, 4, k_shape), imt = tensor(in, kDLUInt, 8, 4, image), pt = tensor(floats, kDLFloat, 32, 4, pixel);
  int64_t high[] = {INT64_C(1) << 40, 0};
  halfbyte_affine to = {0, 2.0f, 3};
  DLTensor t;
  halfbyte_int8_layer layer = {0}, bad;
  halfbyte_linear_int8 *linear = NULL, *to_floats = NULL, *none = (halfbyte_linear_int8 *)w;
  halfbyte_conv2d_int8 *conv = NULL;
  layer.codes = &ct;
  layer.scales = &st;
  layer.zeros = &zt;
  layer.x.scale = 0.25f;
  layer.x.zero = 4;
  layer.y = &to;
  layer.bias = &bt;
#define BAD(change, words)                                          \
  do {                                                              \
    bad = layer;                                                    \
    change;                                                         \
    INVALID(halfbyte_linear_int8_create(device, &bad, &none), words); \
  } while (0)
  t = ct;
  t.shape = high;
  BAD(bad.codes = &t, "rows or columns of a weight without elements");
  INVALID(halfbyte_linear_int8_create(device, NULL, &none), "layer: expected a pointer");
  HOLDS(none == NULL);
  BAD(bad.codes = NULL, "codes: expected a pointer");
  BAD(bad.codes = &ft, "codes: expected bytes: u8 or i8, got f32");
  BAD(bad.codes = &kt, "codes: expected 2 dimensions");
  BAD(bad.scales = NULL, "scales: expected a pointer");
  BAD(bad.scales = &bt, "scales: expected floats");
  BAD(bad.zeros = &st, "zeros: expected i32, got f32");
  BAD(bad.x.is_signed = 7, "is_signed of 0 or 1");
  BAD(bad.x.scale = 0, "a finite scale above 0");
  BAD(bad.x.zero = 256, "");
  BAD(bad.float_bias = &fbt, "an int32 bias");
  BAD(bad.bias = &zt, "a bias of 2");
  BAD(bad.activation = HALFBYTE_ACTIVATION_SILU, "");
  BAD(bad.activation = -1, "one of HALFBYTE_ACTIVATION_*");
#undef BAD
  OK(halfbyte_linear_int8_create(device, &layer, &linear));
  layer.y = NULL;
  layer.float_bias = &fbt;
  OK(halfbyte_linear_int8_create(device, &layer, &to_floats));
  OK(halfbyte_linear_int8_forward(linear, device, &it, &ot));
  OK(halfbyte_linear_int8_forward(to_floats, device, &it, &ft));
  /* Sums of (x - 4) * w + bias: 6 - 32 + 7 = -19 and 18 + 1600 - 7 = 1611, in steps of 0.125, plus the float bias. */
  HOLDS(floats[0] == -19 * 0.125f + 1 && floats[1] == 1611 * 0.125f + 2);
  /* In steps of 2 from 3 on: -1.1875 + 3 rounds to 2, 100.6875 + 3 to 104. */
  HOLDS(out[0] == 2 && out[1] == 104);
  INVALID(halfbyte_linear_int8_forward(linear, device, &it, &ft), "outputs in bytes");
  INVALID(halfbyte_linear_int8_forward(to_floats, device, &it, &ot), "outputs in floats");
  INVALID(halfbyte_linear_int8_forward(linear, device, &ft, &ot), "x: expected bytes");
  INVALID(halfbyte_linear_int8_forward(linear, device, &it, &it), "memory of its own");
  INVALID(halfbyte_linear_int8_forward(NULL, device, &it, &ot), "linear: expected a pointer");
  it.dtype.code = kDLInt;
  INVALID(halfbyte_linear_int8_forward(linear, device, &it, &ot), "inputs in u8, got i8");
  it.dtype.code = kDLUInt;

  bad = layer;
  bad.codes = &kt;
  bad.bias = NULL;
  bad.float_bias = NULL;
  INVALID(halfbyte_conv2d_int8_create(device, &bad, NULL, 0, 0, &conv), "geometry: expected a pointer");
  INVALID(halfbyte_conv2d_int8_create(device, &layer, &geometry, 0, 0, &conv), "codes: expected shape [1, 2, 1, 1]");
  INVALID(halfbyte_conv2d_int8_create(device, &bad, &geometry, 5, 0, &conv), "x_layout");
  OK(halfbyte_conv2d_int8_create(device, &bad, &geometry, 0, 0, &conv));
  OK(halfbyte_conv2d_int8_forward(conv, device, &imt, &pt));
  HOLDS(floats[0] == (6 * 5 - 16 * 6) * 0.125f);
  INVALID(halfbyte_conv2d_int8_forward(conv, device, &pt, &pt), "2 channels");
  INVALID(halfbyte_conv2d_int8_forward(NULL, device, &imt, &pt), "conv2d: expected a pointer");
  halfbyte_conv2d_int8_free(conv);
  halfbyte_linear_int8_free(linear);
  halfbyte_linear_int8_free(to_floats);
}

static int32_t stop_at_once(void *calls, int64_t token, const char *text, size_t length) {
  HOLDS(token >= -1 && strlen(text) <= length && text[length] == 0);
  return ++*(int *)calls == 2;
}

static void files(halfbyte_device *device, const char *path, const char *quantised) {
  const char *layer = "model.layers.0.mlp.down_proj";
  static char text[1026];
  const char *stop[] = {"\n"}, *no_text[] = {NULL}, *empty[] = {""}, *long_text[] = {text};
  halfbyte_checkpoint *checkpoint = NULL, *none = (halfbyte_checkpoint *)w;
  halfbyte_model *model = NULL, *no_model = (halfbyte_model *)w;
  halfbyte_linear *linear = NULL;
  halfbyte_weight *weight = NULL;
  halfbyte_generation_options options;
  halfbyte_generation result;
  int32_t quantized = 7;
  int calls = 0;
  size_t i, found = 0;

  INVALID(halfbyte_checkpoint_open(NULL, &none), "path: expected a pointer");
  HOLDS(none == NULL);
  FAILS(halfbyte_checkpoint_open("/nowhere/at all", &none), BAD_INPUT, "/nowhere/at all: there is no such file");
  INVALID(halfbyte_checkpoint_open(path, NULL), "out: expected a pointer");
  OK(halfbyte_checkpoint_open(path, &checkpoint));
  for (i = 0; i < halfbyte_checkpoint_layers(checkpoint); i++)
    found += strcmp(halfbyte_checkpoint_layer(checkpoint, i), layer) == 0;
  HOLDS(found == 1 && halfbyte_checkpoint_layer(checkpoint, i) == NULL && halfbyte_checkpoint_layer(NULL, 0) == NULL);
  HOLDS(halfbyte_checkpoint_layers(NULL) == 0);
  OK(halfbyte_checkpoint_is_quantized(checkpoint, layer, &quantized));
  HOLDS(quantized == 0);
  INVALID(halfbyte_checkpoint_is_quantized(checkpoint, "nobody", &quantized), "a layer of the checkpoint, got \"nobody\"");
  INVALID(halfbyte_checkpoint_is_quantized(checkpoint, NULL, &quantized), "name: expected a pointer");
  INVALID(halfbyte_checkpoint_is_quantized(NULL, layer, &quantized), "checkpoint: expected a pointer");
  INVALID(halfbyte_checkpoint_is_quantized(checkpoint, layer, NULL), "out: expected a pointer");
  INVALID(halfbyte_weight_load(checkpoint, "nobody", HALFBYTE_ACT_A16, &weight), "a layer of the checkpoint");
  INVALID(halfbyte_weight_load(checkpoint, layer, 44, &weight), "one of HALFBYTE_ACT_*");
  OK(halfbyte_weight_load(checkpoint, layer, HALFBYTE_ACT_A16, &weight));
  INVALID(halfbyte_linear_load(device, checkpoint, "nobody", 0, 0, &linear), "a layer of the checkpoint");
  INVALID(halfbyte_linear_load(device, checkpoint, layer, 0, 66, &linear), "one of HALFBYTE_ACTIVATION_*");
  INVALID(halfbyte_linear_load(device, NULL, layer, 0, 0, &linear), "checkpoint: expected a pointer");
  HOLDS(linear == NULL);
  OK(halfbyte_linear_load(device, checkpoint, layer, HALFBYTE_ACT_A16, HALFBYTE_ACTIVATION_NONE, &linear));
  halfbyte_checkpoint_free(checkpoint);
  HOLDS(halfbyte_linear_n(linear) == halfbyte_weight_n(weight) && halfbyte_linear_k(linear) == halfbyte_weight_k(weight));
  halfbyte_linear_free(linear);
  halfbyte_weight_free(weight);

  INVALID(halfbyte_model_load(NULL, path, NULL, 0, &no_model), "device: expected a pointer");
  HOLDS(no_model == NULL && halfbyte_model_context(NULL) == 0 && halfbyte_model_weight_bytes(NULL) == 0);
  INVALID(halfbyte_model_load(device, NULL, NULL, 0, &no_model), "path: expected a pointer");
  INVALID(halfbyte_model_load(device, path, "w9", 0, &no_model), "a name like w4a16-g128");
  INVALID(halfbyte_model_load(device, path, NULL, 9, &no_model), "one of HALFBYTE_ACT_*");
  FAILS(halfbyte_model_load(device, "/nowhere", NULL, 0, &no_model), BAD_INPUT, "/nowhere");
  INVALID(halfbyte_model_load(device, quantised, "w8a8", 0, &no_model), "quantize: expected null for a model that is quantised already, got w8a8");
  HOLDS(no_model == NULL);
  OK(halfbyte_model_load(device, path, "w4a8-g128", HALFBYTE_ACT_A16, &model));
  HOLDS(halfbyte_model_context(model) > 100 && halfbyte_model_weight_bytes(model) > 1000000);
  INVALID(halfbyte_model_generate(NULL, "a", NULL, NULL, NULL, NULL), "model: expected a pointer");
  INVALID(halfbyte_model_generate(model, NULL, NULL, NULL, NULL, NULL), "prompt: expected a pointer");
  INVALID(halfbyte_model_generate(model, "\xc0", NULL, NULL, NULL, NULL), "prompt: expected text in UTF-8");
  INVALID(halfbyte_generation_options_default(sizeof options, NULL), "out: expected a pointer");
  memset(&options, 0x55, sizeof options);
  INVALID(halfbyte_generation_options_default(sizeof options - 1, &options), "options: expected struct_size");
  HOLDS(((unsigned char *)&options)[0] == 0x55);
  OK(halfbyte_generation_options_default(sizeof options, &options));
  HOLDS(options.struct_size == sizeof options && options.max_tokens == 128 && options.stop == NULL);
  options.struct_size = 3;
  INVALID(halfbyte_model_generate(model, "def ", &options, NULL, NULL, NULL), "struct_size");
  OK(halfbyte_generation_options_default(sizeof options, &options));
  options.temperature = -1;
  INVALID(halfbyte_model_generate(model, "def ", &options, NULL, NULL, NULL), "a temperature of at least 0");
  OK(halfbyte_generation_options_default(sizeof options, &options));
  options.stop_count = 1;
  INVALID(halfbyte_model_generate(model, "def ", &options, NULL, NULL, NULL), "stop: expected 1 texts, got null");
  options.stop = no_text;
  INVALID(halfbyte_model_generate(model, "def ", &options, NULL, NULL, NULL), "stop: expected a pointer");
  options.stop = empty;
  INVALID(halfbyte_model_generate(model, "def ", &options, NULL, NULL, NULL), "stop: expected texts of 1 to 1024 bytes, got one of 0");
  memset(text, 'x', 1025);
  options.stop = long_text;
  INVALID(halfbyte_model_generate(model, "def ", &options, NULL, NULL, NULL), "texts of 1 to 1024 bytes, got one of 1025");
  options.stop = stop;
  options.max_tokens = 40;
  OK(halfbyte_model_generate(model, "def main", &options, NULL, NULL, &result));
  HOLDS(result.finish == HALFBYTE_FINISH_STOP && result.prompt_tokens > 0 && result.new_tokens > 0 && result.new_tokens <= 40);
  OK(halfbyte_generation_options_default(sizeof options, &options));
  OK(halfbyte_model_generate(model, "def main", &options, stop_at_once, &calls, &result));
  HOLDS(result.finish == HALFBYTE_FINISH_CANCELLED && calls >= 2 && result.new_tokens == 2);
  options.max_tokens = 3;
  options.ignore_end = 1;
  OK(halfbyte_model_generate(model, "def main", &options, NULL, NULL, &result));
  HOLDS(result.finish == HALFBYTE_FINISH_LENGTH && result.new_tokens == 3 && result.decode_seconds > 0);
  halfbyte_model_free(model);
}

int main(int argc, char **argv) {
  halfbyte_device *device = NULL;
  int i;
  if (argc != 3) return 2;
  for (i = 0; i < 8 * 32; i++) w[i] = (float)((i * 13) % 31 - 15) * 0.05f;
  for (i = 0; i < 4 * 32; i++) x[i] = (float)((i * 5) % 17 - 8) * 0.1f;
  HOLDS(strcmp(halfbyte_last_error(), "") == 0 && halfbyte_abi_version() == HALFBYTE_ABI_VERSION);
  HOLDS(strlen(halfbyte_version()) >= 5);
  devices();
  OK(halfbyte_device_cpu(2, &device));
  weights_and_layers(device);
  convolutions(device);
  bytes(device);
  files(device, argv[1], argv[2]);
  halfbyte_device_free(device);
  halfbyte_device_free(NULL);
  halfbyte_weight_free(NULL);
  halfbyte_linear_free(NULL);
  halfbyte_conv2d_free(NULL);
  halfbyte_linear_int8_free(NULL);
  halfbyte_conv2d_int8_free(NULL);
  halfbyte_checkpoint_free(NULL);
  halfbyte_model_free(NULL);
  printf("%d wrong\n", failures);
  return failures == 0 ? 0 : 1;
}
