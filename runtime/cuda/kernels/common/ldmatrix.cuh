// Matrices of 8 x 8 elements of 16 bits (or of 8 x 4 of 32) from shared memory to the fragments of mma.sync, on every GPU from sm_80 on.
#pragma once

DEVICE u32 smem_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }
DEVICE void ldmatrix_x4(u32 address, u32& a, u32& b, u32& c, u32& d) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(address) : "memory");
}
DEVICE void ldmatrix_x4_trans(u32 address, u32& a, u32& b, u32& c, u32& d) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(address) : "memory");
}
DEVICE void ldmatrix_x1_trans(u32 address, u32& a) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(a) : "r"(address) : "memory");
}
DEVICE void ldmatrix_x2_trans(u32 address, u32& a, u32& b) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(a), "=r"(b) : "r"(address) : "memory");
}
