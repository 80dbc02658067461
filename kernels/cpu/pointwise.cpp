// Operations of torch on single elements of strided tensors, and sums, means, maxima and softmax over
// one dimension, for recorded calls. Elements are converted to float or double, computed in runs that
// fit into the first cache, and rounded once.
#include "thread_pool.h"
#include "vec.h"

namespace {

constexpr int64_t kRun = 256;

enum Type : int64_t { kFloat, kBfloat, kInt64, kInt32, kBool, kDouble };

// The order is that of `OPERATIONS` in pointwise.py.
enum Operation : int64_t {
  kCopy, kAdd, kSub, kMul, kDiv, kMaximum, kMinimum, kPow, kFloorDivide,
  kEqual, kNotEqual, kLess, kLessEqual, kGreater, kGreaterEqual, kAnd, kOr, kNot,
  kWhere, kClamp, kNeg, kAbs, kSquare, kSqrt, kRsqrt, kReciprocal, kExp, kExpm1, kLog, kLog1p,
  kSin, kCos, kTanh, kSigmoid, kSilu, kRelu, kSoftplus, kGelu, kGeluTanh, kErf,
};

// Strides are in elements; 0: the dimension is repeated.
struct Operand {
  int64_t type, row, outer, middle, inner;
};

struct PointwiseArgs {
  const void *a, *b, *c;  // null if the operation has fewer operands
  void* out;
  int64_t rows, outer, middle, inner, operation, is_wide;
  Operand of_a, of_b, of_c, of_out;
};

struct ReductionArgs {
  const void* x;
  void* out;
  int64_t rows, outer, middle, inner, operation;  // over `inner`
  Operand of_x, of_out;
};

enum Reduction : int64_t { kSum, kMean, kMax, kSoftmax };

float widen_one(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

template <typename C, typename T>
SWELL_INLINE C to_computed(T x) {
  return C(x);
}
template <>
SWELL_INLINE float to_computed<float, bf16>(bf16 x) {
  return widen_one(x);
}
template <>
SWELL_INLINE double to_computed<double, bf16>(bf16 x) {
  return widen_one(x);
}

template <typename T, typename C>
SWELL_INLINE T from_computed(C x) {
  return T(x);
}
template <>
SWELL_INLINE bf16 from_computed<bf16, float>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return bf16{0x7fc0};
  return bf16{uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
SWELL_INLINE bf16 from_computed<bf16, double>(double x) {
  return from_computed<bf16, float>(float(x));
}
template <>
SWELL_INLINE bool from_computed<bool, float>(float x) {
  return x != 0;
}
template <>
SWELL_INLINE bool from_computed<bool, double>(double x) {
  return x != 0;
}

template <typename F>
SWELL_INLINE void with_type(int64_t type, const F& f) {
  switch (type) {
    case kFloat: return f(float{});
    case kBfloat: return f(bf16{});
    case kInt64: return f(int64_t{});
    case kInt32: return f(int32_t{});
    case kBool: return f(bool{});
    default: return f(double{});
  }
}

template <typename C>
SWELL_INLINE void read(const void* data, int64_t type, int64_t offset, int64_t stride, C* to,
                       int64_t count) {
  with_type(type, [=](auto kind) {
    using T = decltype(kind);
    const T* from = static_cast<const T*>(data) + offset;
    if (stride == 1)
      for (int64_t i = 0; i < count; i++) to[i] = to_computed<C, T>(from[i]);
    else
      for (int64_t i = 0; i < count; i++) to[i] = to_computed<C, T>(from[i * stride]);
  });
}

template <typename C>
SWELL_INLINE void write(void* data, int64_t type, int64_t offset, int64_t stride, const C* from,
                        int64_t count) {
  with_type(type, [=](auto kind) {
    using T = decltype(kind);
    T* to = static_cast<T*>(data) + offset;
    if (stride == 1)
      for (int64_t i = 0; i < count; i++) to[i] = from_computed<T, C>(from[i]);
    else
      for (int64_t i = 0; i < count; i++) to[i * stride] = from_computed<T, C>(from[i]);
  });
}

template <typename F>
SWELL_INLINE void in_vectors(const float* x, float* out, int64_t count, const F& f) {
  const int64_t full = count & ~int64_t(7), tail = count - full;
  for (int64_t i = 0; i < full; i += 8) store(out + i, f(load(x + i)));
  if (tail) store_part(out + full, f(load_part(x + full, tail)), tail);
}
template <typename F>
SWELL_INLINE void in_vectors(const double* x, double* out, int64_t count, const F& f) {
  for (int64_t i = 0; i < count; i++) out[i] = f(splat(float(x[i])))[0];
}

// Sets out[i] = operation(a[i], b[i], c[i]).
template <typename C>
void compute(int64_t operation, const C* a, const C* b, const C* c, C* out, int64_t count) {
#define SWELL_EACH(expression)                                 \
  for (int64_t i = 0; i < count; i++) out[i] = C(expression);  \
  return
#define SWELL_VECTORS(expression) \
  return in_vectors(a, out, count, [](v8 x) { return expression; })
  const C one(1), zero(0);
  switch (operation) {
    case kCopy: SWELL_EACH(a[i]);
    case kAdd: SWELL_EACH(c ? a[i] + b[i] * c[i] : a[i] + b[i]);
    case kSub: SWELL_EACH(c ? a[i] - b[i] * c[i] : a[i] - b[i]);
    case kMul: SWELL_EACH(a[i] * b[i]);
    case kDiv: SWELL_EACH(a[i] / b[i]);
    case kMaximum: SWELL_EACH(a[i] != a[i] || a[i] > b[i] ? a[i] : b[i]);
    case kMinimum: SWELL_EACH(a[i] != a[i] || a[i] < b[i] ? a[i] : b[i]);
    case kPow: SWELL_EACH(std::pow(a[i], b[i]));
    case kFloorDivide: SWELL_EACH(std::floor(a[i] / b[i]));
    case kEqual: SWELL_EACH(a[i] == b[i]);
    case kNotEqual: SWELL_EACH(a[i] != b[i]);
    case kLess: SWELL_EACH(a[i] < b[i]);
    case kLessEqual: SWELL_EACH(a[i] <= b[i]);
    case kGreater: SWELL_EACH(a[i] > b[i]);
    case kGreaterEqual: SWELL_EACH(a[i] >= b[i]);
    case kAnd: SWELL_EACH(a[i] != 0 && b[i] != 0);
    case kOr: SWELL_EACH(a[i] != 0 || b[i] != 0);
    case kNot: SWELL_EACH(a[i] == 0);
    case kWhere: SWELL_EACH(a[i] != 0 ? b[i] : c[i]);
    case kClamp:  // b and c: NaN if there is no bound
      SWELL_EACH(a[i] < b[i] ? (b[i] > c[i] ? c[i] : b[i]) : a[i] > c[i] ? c[i] : a[i]);
    case kNeg: SWELL_EACH(-a[i]);
    case kAbs: SWELL_EACH(std::abs(a[i]));
    case kSquare: SWELL_EACH(a[i] * a[i]);
    case kSqrt: SWELL_EACH(std::sqrt(a[i]));
    case kRsqrt: SWELL_EACH(one / std::sqrt(a[i]));
    case kReciprocal: SWELL_EACH(one / a[i]);
    case kExp: SWELL_EACH(std::exp(a[i]));
    case kExpm1: SWELL_EACH(std::expm1(a[i]));
    case kLog: SWELL_EACH(std::log(a[i]));
    case kLog1p: SWELL_EACH(std::log1p(a[i]));
    case kSin: SWELL_EACH(std::sin(a[i]));
    case kCos: SWELL_EACH(std::cos(a[i]));
    case kTanh: SWELL_EACH(std::tanh(a[i]));
    case kErf: SWELL_EACH(std::erf(a[i]));
    case kSigmoid: SWELL_VECTORS(splat(1.0f) / (splat(1.0f) + vexp(-x)));
    case kSilu: SWELL_VECTORS(x / (splat(1.0f) + vexp(-x)));
    case kRelu: SWELL_EACH(a[i] < zero ? zero : a[i]);
    case kSoftplus: SWELL_EACH(a[i] * b[i] > c[i] ? a[i] : std::log1p(std::exp(a[i] * b[i])) / b[i]);
    case kGelu: SWELL_EACH(a[i] * C(0.5) * (one + std::erf(a[i] * C(0.70710678118654752))));
    case kGeluTanh:
      SWELL_VECTORS(x / (splat(1.0f) + vexp(splat(-1.59576912160573072f) *
                                            (x + splat(0.044715f) * (x * x * x)))));
  }
#undef SWELL_EACH
#undef SWELL_VECTORS
}

// The multiply-adds that take as long as one element.
int64_t cost_of(int64_t operation) {
  return operation < kSqrt && operation != kPow ? 4 : 32;
}

template <typename C>
constexpr Type kComputed = kDouble;
template <>
constexpr Type kComputed<float> = kFloat;

// Reads operands and writes results in place if they are neighbours of the computed type.
template <typename C>
void pointwise(const PointwiseArgs& p) {
  const int64_t vectors = p.rows * p.outer * p.middle;
  const auto in_place = [](const Operand& o) { return o.type == kComputed<C> && o.inner == 1; };
  parallel_for_each(vectors, vectors * p.inner * cost_of(p.operation), [&](int64_t i) {
    const int64_t row = i / (p.outer * p.middle), outer = i / p.middle % p.outer;
    const int64_t middle = i % p.middle;
    C buffers[4][kRun];
    for (int64_t start = 0; start < p.inner; start += kRun) {
      const int64_t count = std::min(kRun, p.inner - start);
      const auto offset = [=](const Operand& o) {
        return row * o.row + outer * o.outer + middle * o.middle + start * o.inner;
      };
      const auto get = [&](const void* data, const Operand& o, C* buffer) -> const C* {
        if (!data) return nullptr;
        if (in_place(o)) return static_cast<const C*>(data) + offset(o);
        if (o.inner || !start) read(data, o.type, offset(o), o.inner, buffer, o.inner ? count : kRun);
        return buffer;
      };
      const C* a = get(p.a, p.of_a, buffers[0]);
      const C* b = get(p.b, p.of_b, buffers[1]);
      const C* c = get(p.c, p.of_c, buffers[2]);
      C* out = in_place(p.of_out) ? static_cast<C*>(p.out) + offset(p.of_out) : buffers[3];
      compute<C>(p.operation, a, b, c, out, count);
      if (out == buffers[3])
        write(p.out, p.of_out.type, offset(p.of_out), p.of_out.inner, out, count);
    }
  });
}

// Calls f(values, start, count) for each run of x's inner dimension.
template <typename F>
SWELL_INLINE void for_runs(const ReductionArgs& p, int64_t offset, const F& f) {
  float x[kRun];
  for (int64_t start = 0; start < p.inner; start += kRun) {
    const int64_t count = std::min(kRun, p.inner - start);
    read(p.x, p.of_x.type, offset + start * p.of_x.inner, p.of_x.inner, x, count);
    f(x, start, count);
  }
}

void reduce(const ReductionArgs& p, int64_t from, int64_t to) {
  float largest = -INFINITY;
  v8 sums = {};
  const auto add = [&](const float* x, int64_t count) {
    for (int64_t i = 0; i < count; i += 8)
      sums += count - i >= 8 ? load(x + i) : load_part(x + i, count - i);
  };
  if (p.operation == kMax || p.operation == kSoftmax)
    for_runs(p, from, [&](const float* x, int64_t, int64_t count) {
      for (int64_t i = 0; i < count; i++)
        largest = x[i] > largest || x[i] != x[i] ? x[i] : largest;
    });
  if (p.operation == kMax) return write(p.out, p.of_out.type, to, 1, &largest, 1);
  if (p.operation != kSoftmax) {
    for_runs(p, from, [&](const float* x, int64_t, int64_t count) { add(x, count); });
    const float sum = hsum(sums), result = p.operation == kMean ? sum / float(p.inner) : sum;
    return write(p.out, p.of_out.type, to, 1, &result, 1);
  }
  const auto exponential = [&](float* x, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] = std::exp(x[i] - largest);
  };
  for_runs(p, from, [&](float* x, int64_t, int64_t count) {
    exponential(x, count);
    add(x, count);
  });
  const float sum = hsum(sums);
  for_runs(p, from, [&](float* x, int64_t start, int64_t count) {
    exponential(x, count);
    for (int64_t i = 0; i < count; i++) x[i] /= sum;
    write(p.out, p.of_out.type, to + start * p.of_out.inner, p.of_out.inner, x, count);
  });
}

}  // namespace

SWELL_API void swell_pointwise(const PointwiseArgs* p) {
  p->is_wide ? pointwise<double>(*p) : pointwise<float>(*p);
}

SWELL_API void swell_reduction(const ReductionArgs* p) {
  const int64_t vectors = p->rows * p->outer * p->middle;
  const int64_t cost = p->operation == kSoftmax ? 64 : 2;
  parallel_for_each(vectors, vectors * p->inner * cost, [=](int64_t i) {
    const int64_t row = i / (p->outer * p->middle), outer = i / p->middle % p->outer;
    const int64_t middle = i % p->middle;
    const auto offset = [=](const Operand& o) {
      return row * o.row + outer * o.outer + middle * o.middle;
    };
    reduce(*p, offset(p->of_x), offset(p->of_out));
  });
}
