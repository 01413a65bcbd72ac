"""SGLang's compiled operators for drafts on a CPU, in PyTorch: for chains, one draft behind another, and not for trees of drafts.

Names and order of arguments are SGLang's.
"""

import torch


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len) -> None:
    """Note new slots of each request's tokens from one position to another; they stand request by request."""
    done = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()):
        req_to_token[row, start:end] = out_cache_loc[done : done + end - start].to(req_to_token.dtype)
        done += end - start


def assign_draft_cache_locs_contiguous_cpu(req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_cols) -> None:
    """The slots of each request's next tokens, from its length on."""
    columns = seq_lens.long()[:, None] + torch.arange(topk * num_cols)
    out_cache_loc.copy_(req_to_token[req_pool_indices.long()].gather(1, columns).flatten())


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len) -> None:
    """The slots of each request's tokens from one position to another, request by request."""
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist())
    found = torch.cat([req_to_token[row, start:end] for row, start, end in rows])
    out_cache_loc[: len(found)] = found.to(out_cache_loc.dtype)


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride) -> None:
    """The last accepted token of each request."""
    last = torch.arange(len(accept_lens)) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def build_tree_kernel_efficient_cpu(
    parent_list,
    selected_index,
    verified_seq_len,
    tree_mask,
    positions,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    topk,
    depth,
    draft_token_num,
    tree_mask_mode,
) -> None:
    """Where the tokens of a chain stand, which follows which, and a mask by which each sees those before it."""
    if topk != 1:
        raise NotImplementedError(f"this stand-in builds chains of drafts; topk={topk}")
    count, steps = len(verified_seq_len), torch.arange(draft_token_num)
    positions.copy_((verified_seq_len.long()[:, None] + steps).flatten())
    retrieve_index.copy_(torch.arange(count * draft_token_num).view(count, -1))
    retrieve_next_token.copy_(torch.where(steps + 1 < draft_token_num, steps + 1, -1).expand(count, -1))
    retrieve_next_sibling.fill_(-1)
    if tree_mask_mode != 1:
        raise NotImplementedError("this stand-in makes masks of the drafts alone (QLEN_ONLY), as SGLang asks on a CPU")
    tree_mask.copy_(torch.ones(draft_token_num, draft_token_num, dtype=torch.bool).tril().expand(count, -1, -1).flatten())


def verify_tree_greedy_cpu(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling, target_predict
) -> None:
    """Drafts are accepted as long as each is what the model says behind the one before; what it says behind the last comes on top."""
    flat = predicts.flatten()
    for row, (drafts, said, places) in enumerate(zip(candidates.tolist(), target_predict.tolist(), retrive_index.tolist())):
        accepted = 0
        while accepted + 1 < min(len(drafts), accept_index.shape[1]) and drafts[accepted + 1] == said[accepted]:
            accepted += 1
        for number in range(accepted + 1):
            accept_index[row, number], flat[places[number]] = places[number], said[number]
        accept_token_num[row] = accepted
