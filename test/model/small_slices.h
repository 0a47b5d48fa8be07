// Slices and pieces of so few elements that the models of tests have several; 8-bit moments of small models, too. Include it
// before the product's headers.
#ifndef TEST_SMALL_SLICES_H
#define TEST_SMALL_SLICES_H
#define UPDATE_SLICE ((size_t)700)
#define PAGE_PIECE   ((size_t)600) // bytes
#define MOMENT_SMALL 50
#endif
