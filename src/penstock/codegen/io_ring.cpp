// A queue of reads of the kernel's: io_uring, by its system calls.

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>

namespace {

class Ring {
 public:
  static std::unique_ptr<Ring> open(unsigned depth) {
    auto ring = std::unique_ptr<Ring>(new Ring());
    return ring->set_up(depth) ? std::move(ring) : nullptr;
  }

  ~Ring() {
    if (entries_ != nullptr) munmap(entries_, entries_bytes_);
    if (rings_ != nullptr) munmap(rings_, rings_bytes_);
    if (fd_ >= 0) close(fd_);
  }

  // There is always room: no more than `depth` reads are in flight.
  void push(int fd, char* to, int64_t length, int64_t offset, uint64_t tag) {
    const unsigned tail = *sq_tail_;
    const unsigned slot = tail & sq_mask_;
    io_uring_sqe& entry = entries_[slot];
    std::memset(&entry, 0, sizeof entry);
    entry.opcode = IORING_OP_READ;
    entry.fd = fd;
    entry.addr = reinterpret_cast<uint64_t>(to);
    entry.len = static_cast<uint32_t>(length);
    entry.off = static_cast<uint64_t>(offset);
    entry.user_data = tag;
    sq_array_[slot] = slot;
    std::atomic_ref<unsigned>(*sq_tail_).store(tail + 1, std::memory_order_release);
    ++num_new_;
  }

  // Tells the kernel of new reads and waits until so many have ended. Returns 0 or errno.
  int enter(unsigned num_ended) {
    const unsigned flags = num_ended > 0 ? IORING_ENTER_GETEVENTS : 0;
    const long taken = syscall(SYS_io_uring_enter, fd_, num_new_, num_ended, flags, nullptr, 0);
    if (taken < 0) return errno;
    num_new_ -= static_cast<unsigned>(taken);
    return 0;
  }

  // Tells the kernel of new reads and waits for at least one to end. Returns 0 or errno.
  int submit_and_wait() {
    for (;;) {
      const int error = enter(1);
      if (error != EINTR && error != EAGAIN && error != EBUSY) return error;
    }
  }

  // The next read that has ended, if there is one.
  bool pop(uint64_t& tag, int& result) {
    const unsigned head = *cq_head_;
    if (head == std::atomic_ref<unsigned>(*cq_tail_).load(std::memory_order_acquire)) return false;
    const io_uring_cqe& entry = completions_[head & cq_mask_];
    tag = entry.user_data;
    result = entry.res;
    std::atomic_ref<unsigned>(*cq_head_).store(head + 1, std::memory_order_release);
    return true;
  }

 private:
  Ring() = default;

  bool set_up(unsigned depth) {
    io_uring_params params{};
    fd_ = static_cast<int>(syscall(SYS_io_uring_setup, depth, &params));
    if (fd_ < 0 || !(params.features & IORING_FEAT_SINGLE_MMAP)) return false;
    rings_bytes_ =
        std::max(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                 params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    void* rings = mmap(nullptr, rings_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                       fd_, IORING_OFF_SQ_RING);
    if (rings == MAP_FAILED) return false;
    rings_ = static_cast<char*>(rings);
    entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    void* entries = mmap(nullptr, entries_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                         fd_, IORING_OFF_SQES);
    if (entries == MAP_FAILED) return false;
    entries_ = static_cast<io_uring_sqe*>(entries);
    const auto word = [&](unsigned offset) { return reinterpret_cast<unsigned*>(rings_ + offset); };
    sq_tail_ = word(params.sq_off.tail);
    sq_mask_ = *word(params.sq_off.ring_mask);
    sq_array_ = word(params.sq_off.array);
    cq_head_ = word(params.cq_off.head);
    cq_tail_ = word(params.cq_off.tail);
    cq_mask_ = *word(params.cq_off.ring_mask);
    completions_ = reinterpret_cast<io_uring_cqe*>(rings_ + params.cq_off.cqes);
    return true;
  }

  int fd_ = -1;
  char* rings_ = nullptr;
  size_t rings_bytes_ = 0;
  io_uring_sqe* entries_ = nullptr;
  size_t entries_bytes_ = 0;
  unsigned* sq_tail_ = nullptr;
  unsigned sq_mask_ = 0;
  unsigned* sq_array_ = nullptr;
  unsigned* cq_head_ = nullptr;
  unsigned* cq_tail_ = nullptr;
  unsigned cq_mask_ = 0;
  io_uring_cqe* completions_ = nullptr;
  unsigned num_new_ = 0;
};

}  // namespace
