// Sixteen by sixteen words: turning them in registers (AVX-512), and AMX's tile registers, of which a process must ask
// for the use and which it shares with other libraries.

#pragma once

#include <cstdint>

#ifdef __AVX512F__
#include <immintrin.h>

namespace {

inline void transpose(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
    }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    }
}

}  // namespace
#endif

#if defined(__AMX_BF16__) && defined(__linux__)
#define RILL_AMX 1

#include <sys/syscall.h>
#include <unistd.h>

namespace {

struct alignas(64) TileConfig {
    uint8_t palette = 0, start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t columns_bytes[16] = {};
    uint8_t rows[16] = {};
};

// All eight tiles with 16 rows of 64 bytes, for this thread. Other libraries in this process use the tiles too, and some
// remember what they configured: it is put back.
struct TileScope {
    TileConfig before;
    TileScope() {
        _tile_storeconfig(&before);
        TileConfig mine;
        mine.palette = 1;
        for (int i = 0; i < 8; i++) {
            mine.columns_bytes[i] = 64;
            mine.rows[i] = 16;
        }
        _tile_loadconfig(&mine);
    }
    ~TileScope() {
        if (before.palette)
            _tile_loadconfig(&before);
        else
            _tile_release();
    }
};

// Whether this process may use the tiles: Linux hands them out on request.
inline bool may_use_tiles() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return granted;
}

}  // namespace
#endif
