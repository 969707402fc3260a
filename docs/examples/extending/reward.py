async def compute_score(data_source, solution_str, ground_truth, extra_info, *, cost=0.0):
    right = ground_truth in solution_str.split("assistant\n")[-1]
    called = "<tool_call>" in solution_str
    return {"score": right + 0.25 * called - cost * len(solution_str), "right": right, "called": called}
