// Independent parts of a packing problem, and their buffers.
//
// Times become sections: between two neighbouring events (a buffer begins or ends) nothing changes,
// so a buffer is a list of ranges of sections. Sizes are divided by their common divisor. Parts
// that are never live together share no section and are packed one by one.
//
// The C++ files of this folder are one translation unit, in the order that _native.py gives.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

namespace {

using Size = int64_t;
constexpr Size kNever = std::numeric_limits<Size>::max() / 4;
constexpr Size kFree = -1;  // the fixed offset of a buffer that has none

struct Range {
  int begin, end;  // sections, half-open
};

struct Part {
  std::vector<int> ids;                    // the caller's number of each buffer
  std::vector<Size> size, alignment, fixed;
  std::vector<std::vector<Range>> ranges;  // sorted, apart from each other
  int num_sections = 0;
  std::vector<std::vector<int>> overlaps;  // filled where a search needs them

  int count() const { return static_cast<int>(ids.size()); }
  int first(int b) const { return ranges[b].front().begin; }
  int last(int b) const { return ranges[b].back().end; }
  int lifetime(int b) const {
    int sections = 0;
    for (const Range& range : ranges[b]) sections += range.end - range.begin;
    return sections;
  }
};

struct Layout {
  std::vector<Size> offsets;
  Size height = kNever;
};

Size aligned(Size offset, Size alignment) {
  return alignment == 1 ? offset : (offset + alignment - 1) / alignment * alignment;
}

bool overlap(const std::vector<Range>& one, const std::vector<Range>& other) {
  for (size_t i = 0, j = 0; i < one.size() && j < other.size();) {
    if (one[i].end <= other[j].begin) {
      ++i;
    } else if (other[j].end <= one[i].begin) {
      ++j;
    } else {
      return true;
    }
  }
  return false;
}

// The live bytes of each section.
std::vector<Size> live_bytes(const Part& part) {
  std::vector<Size> change(part.num_sections + 1, 0);
  for (int b = 0; b < part.count(); ++b) {
    for (const Range& range : part.ranges[b]) {
      change[range.begin] += part.size[b];
      change[range.end] -= part.size[b];
    }
  }
  std::partial_sum(change.begin(), change.end(), change.begin());
  change.pop_back();
  return change;
}

// The largest live bytes of any section that each buffer lives in.
std::vector<Size> contention(const Part& part) {
  const std::vector<Size> live = live_bytes(part);
  std::vector<Size> result(part.count(), 0);
  // A sparse table has the maximum of a range at once; long lifetimes would make this quadratic.
  std::vector<std::vector<Size>> table{live};
  for (int width = 1; 2 * width <= part.num_sections; width *= 2) {
    const std::vector<Size>& half = table.back();
    std::vector<Size> whole(part.num_sections - 2 * width + 1);
    for (size_t t = 0; t < whole.size(); ++t) whole[t] = std::max(half[t], half[t + width]);
    table.push_back(std::move(whole));
  }
  for (int b = 0; b < part.count(); ++b) {
    for (const Range& range : part.ranges[b]) {
      const int level = 31 - __builtin_clz(static_cast<unsigned>(range.end - range.begin));
      const Size most = std::max(table[level][range.begin], table[level][range.end - (1 << level)]);
      result[b] = std::max(result[b], most);
    }
  }
  return result;
}

Size lower_bound(const Part& part) {
  Size bound = 0;
  for (Size live : live_bytes(part)) bound = std::max(bound, live);
  for (int b = 0; b < part.count(); ++b) {
    if (part.fixed[b] != kFree) bound = std::max(bound, part.fixed[b] + part.size[b]);
  }
  return bound;
}

void fill_overlaps(Part& part) {
  if (!part.overlaps.empty()) return;
  part.overlaps.resize(part.count());
  std::vector<int> order(part.count());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](int a, int b) { return part.first(a) < part.first(b); });
  for (size_t i = 0; i < order.size(); ++i) {
    for (size_t j = i + 1; j < order.size(); ++j) {
      if (part.first(order[j]) >= part.last(order[i])) break;
      if (!overlap(part.ranges[order[i]], part.ranges[order[j]])) continue;
      part.overlaps[order[i]].push_back(order[j]);
      part.overlaps[order[j]].push_back(order[i]);
    }
  }
}

// `_PackingArguments` of _native.py, field by field.
struct Request {
  int64_t num_buffers;
  const int64_t *size, *alignment, *fixed;  // one a buffer; fixed is -1 where there is none
  const int64_t* first_span;                // num_buffers + 1: where the spans of a buffer begin
  const int64_t *lower, *upper;             // one a span, half-open, ascending within a buffer
  int64_t capacity;                         // -1: as low as possible
  double time_limit;                        // seconds
  int64_t seed;
  const std::atomic<int32_t>* stop;  // not zero: return the best so far
};

Size common_divisor(const Request& request) {
  Size divisor = 0;
  for (int64_t b = 0; b < request.num_buffers; ++b) {
    divisor = std::gcd(divisor, request.size[b]);
    if (request.alignment[b] != 1) divisor = std::gcd(divisor, request.alignment[b]);
    if (request.fixed[b] > 0) divisor = std::gcd(divisor, request.fixed[b]);
  }
  return std::max<Size>(divisor, 1);
}

// Split a request into parts that share no moment, in units of `divisor`.
std::vector<Part> split(const Request& request, Size divisor) {
  const int n = static_cast<int>(request.num_buffers);
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  auto begin = [&](int64_t b) { return request.lower[request.first_span[b]]; };
  auto end = [&](int64_t b) { return request.upper[request.first_span[b + 1] - 1]; };
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return begin(a) != begin(b) ? begin(a) < begin(b) : a < b;
  });
  std::vector<Part> parts;
  for (size_t i = 0; i < order.size();) {
    size_t j = i;
    int64_t reach = end(order[i]);
    while (j < order.size() && (j == i || begin(order[j]) < reach)) {
      reach = std::max(reach, end(order[j++]));
    }
    std::vector<int64_t> times;
    for (size_t k = i; k < j; ++k) {
      const int64_t b = order[k];
      for (int64_t s = request.first_span[b]; s < request.first_span[b + 1]; ++s) {
        times.push_back(request.lower[s]);
        times.push_back(request.upper[s]);
      }
    }
    std::sort(times.begin(), times.end());
    times.erase(std::unique(times.begin(), times.end()), times.end());
    auto section = [&](int64_t time) {
      return static_cast<int>(std::lower_bound(times.begin(), times.end(), time) - times.begin());
    };
    Part part;
    part.num_sections = static_cast<int>(times.size()) - 1;
    std::sort(order.begin() + i, order.begin() + j);  // the caller's order is often good
    for (size_t k = i; k < j; ++k) {
      const int64_t b = order[k];
      part.ids.push_back(static_cast<int>(b));
      part.size.push_back(request.size[b] / divisor);
      const bool trivial = request.alignment[b] == 1 || request.alignment[b] == divisor;
      part.alignment.push_back(trivial ? 1 : request.alignment[b] / divisor);
      const int64_t fixed = request.fixed[b];
      part.fixed.push_back(fixed < 0 ? kFree : fixed / divisor);
      part.ranges.emplace_back();
      for (int64_t s = request.first_span[b]; s < request.first_span[b + 1]; ++s) {
        part.ranges.back().push_back({section(request.lower[s]), section(request.upper[s])});
      }
    }
    parts.push_back(std::move(part));
    i = j;
  }
  return parts;
}

}  // namespace
