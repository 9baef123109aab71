"""Each way in which labkit was once broken on purpose, and the tests that hold it since.

    python -m pytest $(python tests/test_attack.py)      # all of them

Rows are those of the attack on the launcher, the commands and the checks.
"""

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROWS = {
    1: (
        "an answer that leaves with exit() passes",
        "test_checks_ask::test_an_answer_that_would_end_the_kernel_is_wrong",
        "test_checks_on_ranks::test_a_run_that_ends_well_passes_nothing_without_what_the_ranks_send",
        "test_checks_on_ranks::test_an_answer_that_leaves_is_wrong",
        "test_checks_on_ranks::test_ranks_that_really_leave_have_not_passed",
    ),
    2: (
        "an answer replaces what judges it",
        "test_checks_ask::test_a_result_judged_in_the_notebook_is_not_judged_by_what_the_answer_replaced",
        "test_checks_on_ranks::test_an_answer_cannot_judge_itself",
    ),
    3: (
        "parity of zero steps says ok",
        "test_refusals::test_what_means_nothing_is_refused_before_a_launch",
        "test_parity::test_losses_of_no_step_are_an_error",
        "test_parity::test_fewer_steps_than_were_asked_for_are_not_ok",
    ),
    4: ("threads that plan at the same time", "test_config::test_threads_read_at_the_same_time"),
    5: (
        "files left open, atexit functions and child processes at a rank's end",
        "test_ending::test_a_rank_does_at_its_end_what_it_does_under_a_bare_torchrun",
        "test_ending::test_a_forked_process_leaves_its_parents_end_to_the_parent",
    ),
    6: (
        "programs with a byte order mark, a coding line, binary content",
        "test_config::test_a_file_that_is_not_python_is_refused",
        "test_config::test_what_python_runs_is_read_and_run",
    ),
    7: (
        "a process in a session of its own, with an empty environment",
        "test_process::test_nothing_is_left_of_a_run_that_ended_well",
        "test_process::test_kill_9_of_the_notebook_ends_the_run",
    ),
    8: (
        "the run's folder is deleted in mid-run",
        "test_run::test_what_ended_a_run_is_raised_although_its_folder_is_gone",
        "test_run::test_a_program_that_deletes_the_folder_of_its_run",
        "test_process::test_the_stacks_of_a_run_whose_folder_is_gone",
    ),
    9: ("damaged files of a run", "test_result::test_a_damaged_file_of_a_run_is_named_with_the_rule_and_the_fix"),
    10: ("strange records during a run", "test_progress::test_strange_records_do_not_end_a_run"),
    11: (
        "a Config that raises while it is read or asked",
        "test_config::test_a_config_that_cannot_be_read",
        "test_config::test_a_mistake_in_a_method_is_told_with_its_line",
    ),
    12: (
        "an exception whose text cannot be had",
        "test_run::test_an_exception_whose_text_cannot_be_had_is_reported",
    ),
    13: (
        "a store on all interfaces, and folders that all can read",
        "test_security::test_a_run_listens_on_loopback_alone",
        "test_security::test_nobody_else_reads_a_run",
    ),
    14: ("answers that are no plain functions", "test_checks_ask::test_an_answer_may_be_any_function"),
    15: (
        "values that cannot be shown or compared",
        "test_checks_ask::test_whatever_an_answer_gives_there_is_a_verdict",
    ),
    16: (
        "an answer that never ends",
        "test_checks_on_ranks::test_a_loop_without_an_end_is_told_from_ranks_that_wait_for_each_other",
        "test_checks_on_ranks::test_the_stacks_of_a_run_without_an_end_say_why",
    ),
    17: (
        "an answer that uses other cells",
        "test_checks_on_ranks::test_an_answer_uses_helpers_and_imports_of_other_cells",
    ),
    18: ("a plan that does not end in time", "test_checks_fsdp::test_a_plan_that_does_not_run_to_its_end_is_wrong"),
    19: (
        "a rank ends while others wait",
        "test_run::test_a_rank_that_ends_well_while_another_waits_for_it",
    ),
    20: (
        "a full disk",
        "test_run::test_a_disk_that_is_full_before_the_start",
        "test_run::test_a_disk_that_the_output_fills",
    ),
    21: ("a million ranks", "test_run::test_a_bad_argument_is_refused_at_once"),
    22: (
        "numpy's numbers as arguments",
        "test_run::test_a_bad_argument_is_refused_at_once",
        "test_run::test_sweep_runs_in_order_and_checks_everything_first",
        "test_config::test_a_good_value_is_kept_as_its_type",
        "test_config::test_a_bad_value_is_refused_with_what_is_allowed",
    ),
    23: (
        "numbers that mean nothing",
        "test_refusals::test_what_means_nothing_is_refused_before_a_launch",
        "test_refusals::test_a_rank_under_bare_torchrun_refuses_the_same_in_one_line",
        "test_refusals::test_every_number_of_a_program_has_limits",
    ),
    24: ("a program called __init__", "test_run::test_an_unknown_program_is_refused"),
    25: ("run PROGRAM --help", "test_main::test_help_lists_the_options_of_run_and_of_the_program"),
    26: ("Ctrl-C of the command line", "test_main::test_ctrl_c_ends_in_one_line_with_status_130"),
    27: (
        "lines and messages of megabytes",
        "test_progress::test_a_long_line_is_cut_where_it_is_shown",
        "test_run::test_a_long_message_is_cut_and_its_whole_text_is_in_the_output",
    ),
    28: (
        "environment variables that mean nothing",
        "test_progress::test_a_display_that_there_is_not_is_refused_before_a_run",
        "test_run::test_a_runs_folder_of_nobody",
    ),
    29: ("a program with a very long name", "test_run::test_a_process_group_works_from_any_folder"),
    30: ("ranks that hang at their end", "test_rank::test_a_process_group_outlives_its_session"),
    31: (
        "notebooks with other parameters",
        "test_notebooks::test_a_value_outside_its_range_is_refused_by_the_first_cell_that_uses_it",
    ),
}


def test_every_row_is_held_by_tests_that_there_are():
    assert ROWS.keys() == set(range(1, 32))
    for row, (_, *tests) in ROWS.items():
        assert tests, row
        for test in tests:
            file, _, name = test.partition("::")
            assert re.search(rf"^def {name}\(", (FOLDER / f"{file}.py").read_text(), re.MULTILINE), (row, test)


if __name__ == "__main__":
    tests = {test for _, *tests in ROWS.values() for test in tests}
    print(*sorted(f"tests/{test.replace('::', '.py::')}" for test in tests))
