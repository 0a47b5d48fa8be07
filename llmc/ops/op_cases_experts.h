/*
The cases of the ops of experts.
*/
#ifndef LLMC_OP_CASES_EXPERTS_H
#define LLMC_OP_CASES_EXPERTS_H

static void case_router_logits(const OpShape *s) { (void)s; }
static void case_router_choose(const OpShape *s) { (void)s; }
static void case_router_weights(const OpShape *s) { (void)s; }
static void case_router_backward(const OpShape *s) { (void)s; }
static void case_router_count(const OpShape *s) { (void)s; }
static void case_route_sort(const OpShape *s) { (void)s; }
static void case_route_gather(const OpShape *s) { (void)s; }
static void case_route_combine(const OpShape *s) { (void)s; }
static void case_route_weigh(const OpShape *s) { (void)s; }
static void case_route_weigh_backward(const OpShape *s) { (void)s; }
static void case_experts_forward(const OpShape *s) { (void)s; }
static void case_experts_forward_quantised(const OpShape *s) { (void)s; }
static void case_experts_backward_input(const OpShape *s) { (void)s; }
static void case_experts_backward_weight(const OpShape *s) { (void)s; }

#endif
