// Slices and pieces of so few elements that the models of tests have several of them. Moments of small models have 8
// bits, too. Include this file before the product's headers.
#ifndef TEST_SMALL_SLICES_H
#define TEST_SMALL_SLICES_H
#define UPDATE_SLICE ((size_t)700)
#define PAGE_PIECE   ((size_t)600) // bytes
#define MOMENT_SMALL 50
#endif
