#include "csrc/cpu/lowering.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

namespace hybridkv::cpu {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

std::string text(std::int64_t number) { return std::to_string(number); }

// Limit for addresses and sizes. A sum of two smaller numbers does not overflow.
constexpr std::int64_t kMemoryEnd = std::int64_t{1} << 56;
// Block ids have 32 bits.
constexpr std::int64_t kMostBlocks = std::int64_t{1} << 31;
// Limit for the pieces of a job. Each piece is at most one row of 48 bytes, so the rows take at most 6 GiB. Valid
// arguments may still need more memory than is free.
constexpr std::int64_t kMostPieces = std::int64_t{1} << 27;

// Takes the next elements of an array; throws if there are too few.
template <typename T>
class Cursor {
 public:
  Cursor(std::span<const T> all, const char* name) : all_(all), name_(name) {}

  std::span<const T> take(std::int64_t count) {
    if (static_cast<std::uint64_t>(count) > all_.size() - at_) {
      refuse(std::string(name_) + ": fewer than the shapes say");
    }
    const std::span<const T> taken = all_.subspan(at_, static_cast<std::size_t>(count));
    at_ += static_cast<std::size_t>(count);
    return taken;
  }
  void require_end() const {
    if (at_ != all_.size()) refuse(std::string(name_) + ": more than the shapes say");
  }

 private:
  std::span<const T> all_;
  const char* name_;
  std::size_t at_ = 0;
};

void require_shape(const CopyShape& shape) {
  for (const std::int32_t number : {shape.num_copies, shape.first_block, shape.num_blocks, shape.stored_blocks,
                                    shape.lead_tokens, shape.trail_tokens, shape.num_local, shape.num_extents}) {
    if (number < 0) refuse("shapes: expected numbers that are not negative, got " + text(number));
  }
  // A copy without elements would make a row of any length valid.
  if (shape.num_local == 0 && shape.num_extents == 0 && shape.num_copies > 0) {
    refuse("shapes: expected copies of a slot or of other blocks, got " + text(shape.num_copies) + " of neither");
  }
}

void require_memory(const char* name, std::int64_t address, std::int64_t num_bytes) {
  if (address < 0 || num_bytes < 0 || address > kMemoryEnd || num_bytes > kMemoryEnd - address) {
    refuse(std::string(name) + ": expected memory, got " + text(num_bytes) + " bytes at " + text(address));
  }
}

// Checks that the pages of each block have valid addresses and do not overlap in a chunk's block.
void require_pages(const BlockPages& pages) {
  if (pages.num_blocks < 0 || pages.num_blocks > kMostBlocks) {
    refuse("num_blocks: expected 0 to 2^31, got " + text(pages.num_blocks));
  }
  if (pages.block_bytes < 0 || pages.block_bytes > kMemoryEnd) {
    refuse("block_bytes: expected 0 to 2^56, got " + text(pages.block_bytes));
  }
  std::int64_t end = 0;
  for (const PageColumn& column : pages.columns) {
    if (column.offset < end || column.page_bytes <= 0) {
      refuse("pages: expected them one after the other, got one at " + text(column.offset));
    }
    if (column.page_bytes > pages.block_bytes || column.offset > pages.block_bytes - column.page_bytes) {
      refuse("pages: expected " + text(pages.block_bytes) + " bytes, got " + text(column.page_bytes) + " at " +
             text(column.offset));
    }
    end = column.offset + column.page_bytes;
    const std::int64_t last = std::max<std::int64_t>(pages.num_blocks - 1, 0);
    if (column.stride_bytes < 0 || (last > 0 && column.stride_bytes > kMemoryEnd / last)) {
      refuse("pages: expected blocks in memory, got a stride of " + text(column.stride_bytes));
    }
    require_memory("pages", column.address, last * column.stride_bytes);
    require_memory("pages", column.address + last * column.stride_bytes, column.page_bytes);
  }
}

// Writes `count` numbers, from `first` on in equal steps. Unsigned, because rows from Python may hold any numbers; four
// at a time, because compilers do not vectorize the plain loop.
void write_steps(std::int64_t* out, std::size_t count, std::int64_t first, std::int64_t step) {
  using Two [[gnu::vector_size(16)]] = std::uint64_t;
  const auto begin = static_cast<std::uint64_t>(first), each = static_cast<std::uint64_t>(step);
  Two low = {begin, begin + each}, high = {begin + 2 * each, begin + 3 * each};
  const Two steps = {4 * each, 4 * each};
  std::size_t done = 0;
  for (; done + 4 <= count; done += 4, low += steps, high += steps) {
    std::memcpy(out + done, &low, sizeof low);
    std::memcpy(out + done + 2, &high, sizeof high);
  }
  for (; done < count; ++done) out[done] = static_cast<std::int64_t>(begin + done * each);
}

// Addresses [begin, end) of all runs of a row, on one side.
Span span_of(std::int64_t first, std::int64_t step, const CopyRow& row) {
  const std::int64_t last = first + (row.num_runs - 1) * step;
  return {std::min(first, last), std::max(first, last) + row.num_bytes};
}

void measure(LoweredRuns& runs) {
  if (runs.rows.empty()) return;
  const CopyRow& first = runs.rows.front();
  Span sources = span_of(first.source, first.source_step, first);
  Span destinations = span_of(first.destination, first.destination_step, first);
  std::int64_t total_bytes = 0;
  for (const CopyRow& row : runs.rows) {
    const Span source = span_of(row.source, row.source_step, row);
    const Span destination = span_of(row.destination, row.destination_step, row);
    sources = {std::min(sources.begin, source.begin), std::max(sources.end, source.end)};
    destinations = {std::min(destinations.begin, destination.begin), std::max(destinations.end, destination.end)};
    // The runs of one row lie in one block, or are one run in memory, so the product does not overflow.
    const std::int64_t row_bytes = row.num_runs * row.num_bytes;
    if (row_bytes > kMemoryEnd - total_bytes) refuse("expected a job of at most 2^56 bytes");
    total_bytes += row_bytes;
  }
  runs.sources = sources;
  runs.destinations = destinations;
  runs.total_bytes = total_bytes;
}

// Finds the rows of columns. Addresses are checked, so differences do not overflow.
std::vector<ColumnRow> rows_of(const std::vector<PageColumn>& columns) {
  std::vector<ColumnRow> rows;
  for (std::size_t column = 0; column < columns.size(); ++column) {
    if (column > 0) {
      const PageColumn &last = columns[column - 1], &next = columns[column];
      ColumnRow& row = rows.back();
      const std::int64_t address_step = next.address - last.address, offset_step = next.offset - last.offset;
      const bool is_alike = next.page_bytes == last.page_bytes && next.stride_bytes == last.stride_bytes;
      if (is_alike && (row.count == 1 || (address_step == row.address_step && offset_step == row.offset_step))) {
        row.address_step = address_step;
        row.offset_step = offset_step;
        ++row.count;
        continue;
      }
    }
    rows.push_back({column, 1, 0, 0});
  }
  return rows;
}

// True if pages are one row that fills a block of a chunk, and is not one run.
bool is_one_row(const BlockPages& pages) {
  if (pages.rows.size() != 1 || pages.rows.front().count == 1) return false;
  const PageColumn& first = pages.columns.front();
  const ColumnRow& row = pages.rows.front();
  return first.offset == 0 && row.offset_step == first.page_bytes && row.address_step != first.page_bytes &&
         static_cast<std::int64_t>(row.count) * first.page_bytes == pages.block_bytes;
}

void require_blocks(std::span<const std::int32_t> ids, const BlockPages& pages) {
  for (const std::int32_t id : ids) {
    if (id < 0 || id >= pages.num_blocks) {
      refuse("block ids must lie in [0, " + text(pages.num_blocks) + "), got " + text(id));
    }
  }
}

}  // namespace

void expand(std::span<const CopyRow> rows, std::int64_t* sources, std::int64_t* destinations, std::int64_t* num_bytes) {
  for (const CopyRow& row : rows) {
    const auto count = static_cast<std::size_t>(row.num_runs);
    write_steps(sources, count, row.source, row.source_step);
    write_steps(destinations, count, row.destination, row.destination_step);
    write_steps(num_bytes, count, row.num_bytes, 0);
    sources += count;
    destinations += count;
    num_bytes += count;
  }
}

// Collects runs in rows, and joins adjacent ones.
class Lowering::Emitter {
 public:
  Emitter(const Lowering& lowering, bool is_store, LoweredRuns& out)
      : lowering_(lowering), is_store_(is_store), out_(out) {}

  bool is_store() const { return is_store_; }
  void end_copy() { out_.ends.push_back(out_.num_runs); }
  std::int64_t slot_bytes() const { return slot_bytes_; }

  // Reserves memory for the next pieces.
  void expect(std::int64_t count) {
    if (count > kMostPieces - num_pieces_) refuse("expected a job of at most 2^27 pieces");
    num_pieces_ += count;
  }

  // Does not join the next run to the last one.
  void part_here() { is_parted_ = true; }

  void begin_slot(std::span<const SlotExtent> extents) {
    slot_bytes_ = 0;
    for (const SlotExtent& extent : extents) {
      if (extent.offset < 0 || extent.num_bytes <= 0 || extent.num_bytes > lowering_.arena_bytes_ ||
          extent.offset > lowering_.arena_bytes_ - extent.num_bytes) {
        refuse("extent (" + text(extent.offset) + ", " + text(extent.num_bytes) + ") does not lie in an arena of " +
               text(lowering_.arena_bytes_) + " bytes");
      }
      slot_bytes_ += extent.num_bytes;
      // The extents would overlap, or their sum would overflow.
      if (slot_bytes_ > lowering_.arena_bytes_) refuse("a slot is larger than the arena");
    }
    extent_ = extents.data();
    extent_start_ = 0;
  }

  // Adds a piece at `address`, and at `offset` in the slot, which may span extents. Offsets ascend from call to call.
  void place(std::int64_t address, std::int64_t offset, std::int64_t num_bytes) {
    while (num_bytes > 0) {
      while (offset >= extent_start_ + extent_->num_bytes) extent_start_ += (extent_++)->num_bytes;
      const std::int64_t into = offset - extent_start_;
      const std::int64_t size = std::min(num_bytes, extent_->num_bytes - into);
      const std::int64_t stored = lowering_.arena_address_ + extent_->offset + into;
      if (is_store_) {
        run(address, stored, size);
      } else {
        run(stored, address, size);
      }
      address += size;
      offset += size;
      num_bytes -= size;
    }
  }

  // Adds a row of pages. A store may add only pages that follow each other in the chunk.
  void place_row(const BlockPages& pages, const ColumnRow& columns, std::int64_t block_id, std::int64_t block_offset) {
    const PageColumn& first = pages.columns[columns.first];
    const std::int64_t address = first.address + block_id * first.stride_bytes;
    const std::int64_t offset = block_offset + first.offset;
    const auto count = static_cast<std::int64_t>(columns.count);
    while (offset >= extent_start_ + extent_->num_bytes) extent_start_ += (extent_++)->num_bytes;
    const std::int64_t into = offset - extent_start_;
    if (into + (count - 1) * columns.offset_step + first.page_bytes > extent_->num_bytes) {
      for (std::int64_t page = 0; page < count; ++page) {
        place(address + page * columns.address_step, offset + page * columns.offset_step, first.page_bytes);
      }
      return;
    }
    const std::int64_t stored = lowering_.arena_address_ + extent_->offset + into;
    if (is_store_) {
      row(address, stored, columns.address_step, columns.offset_step, first.page_bytes, count);
    } else {
      row(stored, address, columns.offset_step, columns.address_step, first.page_bytes, count);
    }
  }

  // Adds blocks that are one row each, with nothing between them, in the usual case: they lie in one extent, and no row
  // joins the one before. Returns how many it added.
  std::int64_t place_rows(const BlockPages& pages, const std::int32_t* ids, std::int64_t count, std::int64_t offset) {
    const PageColumn& first = pages.columns.front();
    const ColumnRow& columns = pages.rows.front();
    const auto num_runs = static_cast<std::int64_t>(columns.count);
    while (offset >= extent_start_ + extent_->num_bytes) extent_start_ += (extent_++)->num_bytes;
    const std::int64_t room = extent_start_ + extent_->num_bytes - offset;
    count = std::min(count, room / pages.block_bytes);
    if (count == 0) return 0;
    const std::size_t before = out_.rows.size();
    out_.rows.resize(before + static_cast<std::size_t>(count));
    CopyRow* const rows = out_.rows.data() + before;
    std::int64_t stored = lowering_.arena_address_ + extent_->offset + (offset - extent_start_);
    std::int64_t next = is_store_ ? next_source_ : next_destination_;
    const std::int64_t next_stored = is_store_ ? next_destination_ : next_source_;
    bool may_join = !is_parted_ && stored == next_stored;
    std::int64_t done = 0;
    for (; done < count; ++done, stored += pages.block_bytes, may_join = true) {
      const std::int64_t address = first.address + ids[done] * first.stride_bytes;
      if (may_join && address == next) break;
      next = address + (num_runs - 1) * columns.address_step + first.page_bytes;
      CopyRow& row = rows[done];
      row.source = is_store_ ? address : stored;
      row.destination = is_store_ ? stored : address;
      row.source_step = is_store_ ? columns.address_step : columns.offset_step;
      row.destination_step = is_store_ ? columns.offset_step : columns.address_step;
      row.num_bytes = first.page_bytes;
      row.num_runs = num_runs;
    }
    out_.rows.resize(before + static_cast<std::size_t>(done));
    if (done == 0) return 0;
    out_.num_runs += done * num_runs;
    is_parted_ = false;
    next_source_ = is_store_ ? next : stored;
    next_destination_ = is_store_ ? stored : next;
    return done;
  }

  // Adds zeros at [offset, end) of the slot.
  void place_zeros(std::int64_t offset, std::int64_t end) {
    if (end - offset > kMemoryEnd - out_.zero_bytes) refuse("a job has more zeros than memory has bytes");
    expect((end - offset) / lowering_.zeros_bytes_);
    out_.zero_bytes += end - offset;
    while (offset < end) {
      const std::int64_t size = std::min(end - offset, lowering_.zeros_bytes_);
      place(lowering_.zeros_address_, offset, size);
      offset += size;
    }
  }

  void run(std::int64_t source, std::int64_t destination, std::int64_t num_bytes) {
    if (joins(source, destination)) {
      if (out_.rows.back().num_runs > 1) split_last();
      out_.rows.back().num_bytes += num_bytes;
    } else {
      push(source, destination, 0, 0, num_bytes, 1);
    }
    next_source_ = source + num_bytes;
    next_destination_ = destination + num_bytes;
  }

  // The parameters are those of `CopyRow`. A struct by value would cost a third of the time of a job.
  void row(std::int64_t source, std::int64_t destination, std::int64_t source_step, std::int64_t destination_step,
           std::int64_t num_bytes, std::int64_t num_runs) {
    if (source_step == num_bytes && destination_step == num_bytes) {
      run(source, destination, num_bytes * num_runs);
      return;
    }
    if (num_runs > 1 && joins(source, destination)) {
      run(source, destination, num_bytes);
      source += source_step;
      destination += destination_step;
      --num_runs;
    }
    if (num_runs == 1) {
      run(source, destination, num_bytes);
      return;
    }
    push(source, destination, source_step, destination_step, num_bytes, num_runs);
    next_source_ = source + (num_runs - 1) * source_step + num_bytes;
    next_destination_ = destination + (num_runs - 1) * destination_step + num_bytes;
  }

 private:
  bool joins(std::int64_t source, std::int64_t destination) const {
    return !is_parted_ && source == next_source_ && destination == next_destination_;
  }

  // Makes the last run of the last row a row of its own.
  void split_last() {
    CopyRow& last = out_.rows.back();
    --last.num_runs;
    const std::int64_t before = last.num_runs;
    out_.rows.push_back({last.source + before * last.source_step, last.destination + before * last.destination_step, 0,
                         0, last.num_bytes, 1});
  }

  void push(std::int64_t source, std::int64_t destination, std::int64_t source_step, std::int64_t destination_step,
            std::int64_t num_bytes, std::int64_t num_runs) {
    out_.rows.emplace_back(source, destination, source_step, destination_step, num_bytes, num_runs);
    out_.num_runs += num_runs;
    is_parted_ = false;
  }

  const Lowering& lowering_;
  const bool is_store_;
  LoweredRuns& out_;
  bool is_parted_ = true;
  std::int64_t next_source_ = 0;
  std::int64_t next_destination_ = 0;
  std::int64_t num_pieces_ = 0;
  std::int64_t slot_bytes_ = 0;
  const SlotExtent* extent_ = nullptr;
  std::int64_t extent_start_ = 0;  // its offset in the slot
};

Lowering::Lowering(std::int64_t arena_address, std::int64_t arena_bytes, std::int64_t zeros_address,
                   std::int64_t zeros_bytes)
    : arena_address_(arena_address),
      arena_bytes_(arena_bytes),
      zeros_address_(zeros_address),
      zeros_bytes_(zeros_bytes) {
  require_memory("arena", arena_address, arena_bytes);
  require_memory("zeros", zeros_address, zeros_bytes);
  if (zeros_bytes == 0) refuse("zeros: expected at least one byte");
}

void Lowering::add_group(std::int32_t group_index, std::int64_t block_tokens, BlockPages pages) {
  require_pages(pages);
  pages.rows = rows_of(pages.columns);
  if (block_tokens < 0) refuse("block_tokens: expected at least 0, got " + text(block_tokens));
  const std::unique_lock lock(changes_);
  groups_.insert_or_assign(group_index, Group{block_tokens, std::move(pages)});
}

void Lowering::add_part(std::int32_t group_index, std::int64_t start, std::int64_t end, BlockPages pages) {
  require_pages(pages);
  pages.rows = rows_of(pages.columns);
  if (start < 0 || end <= start) refuse("tokens " + text(start) + " to " + text(end) + " are none of a block's");
  const std::unique_lock lock(changes_);
  // Not an assignment: another thread may use the old pages.
  parts_.try_emplace({group_index, start, end}, std::move(pages));
}

LoweredRuns Lowering::load(const CopyTable& table) const { return lower(table, false); }

LoweredRuns Lowering::store(const CopyTable& table) const { return lower(table, true); }

LoweredRuns Lowering::lower(const CopyTable& table, bool is_store) const {
  const std::shared_lock lock(changes_);
  LoweredRuns runs;
  runs.rows.reserve(table.block_ids.size());  // usually a row for each block
  Emitter out(*this, is_store, runs);
  // The arena may end where the engine's memory begins, and a run must not cross two registrations.
  for (const bool is_local : {false, true}) {
    if (is_local && table.local_ids.empty()) break;
    Cursor blocks(table.block_ids, "block_ids");
    Cursor local_blocks(table.local_ids, "local_ids");
    Cursor slots(table.extents, "extents");
    for (const CopyShape& shape : table.shapes) {
      require_shape(shape);
      const auto group = groups_.find(shape.group_index);
      if (group == groups_.end()) refuse("group " + text(shape.group_index) + " has no pages");
      for (std::int32_t copy = 0; copy < shape.num_copies; ++copy) {
        const auto ids = blocks.take(shape.num_blocks);
        const auto local_ids = local_blocks.take(shape.num_local);
        const auto extents = slots.take(shape.num_extents);
        if ((shape.num_local > 0) != is_local) continue;
        require_blocks(ids, group->second.pages);
        if (is_local && !is_store) {
          require_blocks(local_ids, group->second.pages);
          copy_local(shape, group->second, ids.data(), local_ids.data(), out);
          continue;
        }
        if (is_local) refuse("a chunk is stored from its blocks alone, got others");
        out.begin_slot(extents);
        copy_chunk(shape, group->second, ids.data(), out);
        if (is_store) {
          out.part_here();
          out.end_copy();
        }
      }
    }
    blocks.require_end();
    local_blocks.require_end();
    slots.require_end();
    out.part_here();
  }
  measure(runs);
  return runs;
}

const BlockPages& Lowering::part(std::int32_t group_index, const Group& group, std::int64_t start,
                                 std::int64_t end) const {
  if (start == 0 && end == group.block_tokens) return group.pages;
  const auto found = parts_.find({group_index, start, end});
  if (found == parts_.end()) {
    refuse("tokens " + text(start) + " to " + text(end) + " of group " + text(group_index) + "'s blocks have no pages");
  }
  if (found->second.num_blocks < group.pages.num_blocks) {
    refuse("tokens " + text(start) + " to " + text(end) + " of group " + text(group_index) + " have pages of " +
           text(found->second.num_blocks) + " blocks, and the group has " + text(group.pages.num_blocks));
  }
  return found->second;
}

std::size_t Lowering::pieces(const CopyShape& shape, const Group& group, Piece (&out)[3]) const {
  const std::int64_t blocks = shape.stored_blocks;
  if (group.block_tokens == 0) {
    out[0] = {&group.pages, 0, blocks};
    return 1;
  }
  const std::int64_t size = group.block_tokens;
  const std::int64_t lead = shape.lead_tokens;
  const std::int64_t end = size - shape.trail_tokens;
  if (blocks == 1) {
    out[0] = {&part(shape.group_index, group, lead, end), 0, 1};
    return 1;
  }
  std::size_t count = 0;
  const std::int64_t first = lead > 0 ? 1 : 0;
  const std::int64_t last = blocks - (end < size ? 1 : 0);
  if (first > 0) out[count++] = {&part(shape.group_index, group, lead, size), 0, 1};
  if (last > first) out[count++] = {&group.pages, first, last - first};
  if (last < blocks) out[count++] = {&part(shape.group_index, group, 0, end), last, 1};
  return count;
}

void Lowering::copy_chunk(const CopyShape& shape, const Group& group, const std::int32_t* ids, Emitter& out) const {
  const std::int64_t begin = shape.first_block;
  const std::int64_t end = begin + shape.num_blocks;
  if (out.is_store() && (begin != 0 || end != shape.stored_blocks)) {
    refuse("a store needs all " + text(shape.stored_blocks) + " blocks of the chunk, got " + text(shape.num_blocks) +
           " blocks from block " + text(begin) + " on");
  }
  if (end > shape.stored_blocks) {
    refuse("blocks " + text(begin) + " to " + text(end) + " are not within a chunk of " + text(shape.stored_blocks));
  }
  Piece pieces_of_it[3];
  const std::size_t num_pieces = pieces(shape, group, pieces_of_it);
  std::int64_t piece_offset = 0;
  for (std::size_t number = 0; number < num_pieces; ++number) {
    const auto [pages, first, count] = pieces_of_it[number];
    if (count > 0 && pages->block_bytes > kMemoryEnd / count) refuse("a chunk is larger than memory");
    const std::int64_t needed = piece_offset + count * pages->block_bytes;
    const std::int64_t from = std::max(first, begin);
    const std::int64_t to = std::min(first + count, end);
    if ((from < to || num_pieces == 1) && needed > out.slot_bytes()) {
      refuse("a chunk of " + text(needed) + " bytes does not fit a slot of " + text(out.slot_bytes()));
    }
    if (from < to) out.expect((to - from) * static_cast<std::int64_t>(pages->columns.size()));
    const bool are_rows = is_one_row(*pages);
    for (std::int64_t block = from; block < to; ++block) {
      if (are_rows) {
        const std::int64_t offset = piece_offset + (block - first) * pages->block_bytes;
        block += out.place_rows(*pages, ids + (block - begin), to - block, offset);
        if (block == to) break;
      }
      const std::int64_t id = ids[block - begin];
      const std::int64_t block_offset = piece_offset + (block - first) * pages->block_bytes;
      std::int64_t at = 0;
      for (const ColumnRow& row : pages->rows) {
        const PageColumn& leading = pages->columns[row.first];
        if (!out.is_store() || row.count == 1 || row.offset_step == leading.page_bytes) {
          if (out.is_store() && at < leading.offset) out.place_zeros(block_offset + at, block_offset + leading.offset);
          out.place_row(*pages, row, id, block_offset);
          at = leading.offset + static_cast<std::int64_t>(row.count - 1) * row.offset_step + leading.page_bytes;
          continue;
        }
        for (std::size_t number = row.first; number < row.first + row.count; ++number) {
          const PageColumn& column = pages->columns[number];
          if (at < column.offset) out.place_zeros(block_offset + at, block_offset + column.offset);
          out.place(column.address + id * column.stride_bytes, block_offset + column.offset, column.page_bytes);
          at = column.offset + column.page_bytes;
        }
      }
      if (out.is_store() && at < pages->block_bytes) {
        out.place_zeros(block_offset + at, block_offset + pages->block_bytes);
      }
    }
    piece_offset = needed;
  }
  if (out.is_store() && piece_offset < out.slot_bytes()) out.place_zeros(piece_offset, out.slot_bytes());
}

void Lowering::copy_local(const CopyShape& shape, const Group& group, const std::int32_t* ids,
                          const std::int32_t* local_ids, Emitter& out) const {
  const std::int64_t count = shape.num_blocks;
  std::vector<std::int32_t> targets(ids, ids + count);
  std::sort(targets.begin(), targets.end());
  bool is_good = shape.num_local == count;
  for (std::int32_t local = 0; is_good && local < count; ++local) {
    is_good = !std::binary_search(targets.begin(), targets.end(), local_ids[local]);
  }
  if (!is_good) {
    refuse("expected as many other blocks as " + text(count) + ", got " + text(shape.num_local) + ", or the same");
  }
  out.expect(count * static_cast<std::int64_t>(group.pages.columns.size()));
  for (std::int64_t block = 0; block < count; ++block) {
    for (const ColumnRow& row : group.pages.rows) {
      const PageColumn& leading = group.pages.columns[row.first];
      out.row(leading.address + local_ids[block] * leading.stride_bytes,
              leading.address + ids[block] * leading.stride_bytes, row.address_step, row.address_step,
              leading.page_bytes, static_cast<std::int64_t>(row.count));
    }
  }
}

}  // namespace hybridkv::cpu
